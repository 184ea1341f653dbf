"""Generate reachability problems: which of two nodes of a directed graph can be reached from a root.

    r b | b c | s d / d c r = [c]               from r, does one come to d or to c?

The graphs are like those of ProsQA (arXiv 2412.06769), written as in `candidates.py`; `prosqa.py` reads the real ones.
In all 300 validation problems of ProsQA, no leaf is further from its root than the right answer, which can therefore be
found without reading the root. Here each candidate is the furthest leaf of its own root, and either root may be asked
about: a model that ignores the root is right half the time.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field
from pydantic import model_validator as validator

from plumbline.data.tasks.candidates import CandidatesConfig
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.task import DrawnTaskConfig, Example

IN_DEGREE = (65, 430, 750, 910, 965, 990)
"""Of 1000 nodes, how many have 0, up to 1, ... up to 5 parents, if that many are available; the rest have 6.

Like `SIDE`, `SHALLOW` and the weights in `grow`, this is fitted to the validation problems of ProsQA, and tests compare
the statistics.
"""

SIDE = 26
"""Of 100 nodes, how many choose parents not reached from the second root, and from the first; the rest choose any."""

SHALLOW = 20
"""One in this many graphs is accepted if both candidates have the fewest allowed steps."""

MOST_NUMBERS = 8
"""Random numbers per node: its in-degree, its side, up to six parents."""

FEWEST_STEPS, MOST_STEPS = 3, 6
"""Fewest and most steps from a root to its candidate, as in ProsQA."""


class ReachabilityConfig(CandidatesConfig, DrawnTaskConfig):
    """Configure reachability in a directed acyclic graph, whose edges and two candidates come in random order.

    Symbols: token 1 is |, 2 is /, 3 is =, then the names of nodes. Words: tokens 1 to 7 are the words, then the names.
    A chain is a shortest path; of several, the one whose names have the lowest ids.
    """

    name: Literal["reachability"] = "reachability"
    """Which task."""
    nodes: int = Field(default=25, ge=12, le=100)
    """Most nodes of a graph; sizes down to an eighth fewer are equally likely. Nodes without edges do not appear. 25
    gives the statistics of ProsQA."""
    names: int | None = Field(default=None, ge=12, le=1000)
    """Number of names, from which each graph draws those of its nodes; null: as many as nodes. For a model that also
    reads another task's graphs, such as prosqa, use the same number there."""

    @validator(mode="after")
    def _check(self) -> "ReachabilityConfig":
        if self.names is not None and self.names < self.nodes:
            raise ValueError(f"names = {self.names}: every node has another one; give at least nodes = {self.nodes}")
        return self

    @property
    def most_names(self) -> int:
        """Return how many names of nodes there are, over all examples."""
        return self.names or self.nodes

    @property
    def most_steps(self) -> int:
        """Return the most steps from a root to its candidate."""
        return MOST_STEPS

    @property
    def longest(self) -> int:
        """Return the most input tokens that an example can have; its last answer is not an input."""
        return self.length_of(self._most_edges, self.longest_answer)

    @property
    def _most_edges(self) -> int:
        return 2 * self.nodes

    def draw(self, draws: Draws) -> Example:
        """Draw one random example."""
        graph = self._graph(draws)
        while not self._is_taken(graph, draws):
            graph = self._graph(draws)
        names = draws.distinct(self.nodes, self.most_names).tolist()
        edges = np.array([(names[p], names[n]) for n, parents in enumerate(graph.parents) for p in parents], np.int64)
        edges = edges[draws.distinct(len(edges), len(edges))]
        asked, swapped = draws.integers(2, 2).tolist()
        candidates = [names[node] for node in (reversed(graph.ends) if swapped else graph.ends)]
        return self.spell(edges, candidates, graph.shortest_path(graph.ends[asked], names))

    def _graph(self, draws: Draws) -> "Graph":
        nodes = self.nodes - int(draws.integers(1, self.nodes // 8 + 1)[0])
        return grow(nodes, iter(draws.numbers(MOST_NUMBERS * nodes)))

    def _is_taken(self, graph: "Graph", draws: Draws) -> bool:
        """Return whether to accept a graph: it needs two candidates and few enough edges; step counts follow ProsQA."""
        if len(graph.ends) < 2 or sum(map(len, graph.parents)) > self._most_edges:
            return False
        shallow = all(graph.depth[node] == FEWEST_STEPS for node in graph.ends)
        return not shallow or not draws.integers(1, SHALLOW)[0]


class Graph(NamedTuple):
    """Hold a graph with roots 0 and 1, whose edges lead from lower to higher numbers."""

    parents: list[list[int]]
    """The parents of each node."""
    depth: list[int]
    """For each node, the steps from the nearest root that reaches it, or 0 if none does."""
    ends: list[int]
    """For each root, the furthest leaf that only this root reaches, if it is 3 to 6 steps away."""

    def shortest_path(self, node: int, names: Sequence[int]) -> list[int]:
        """Return the names on the shortest path to a node that one root reaches; of several, the first by name."""
        if node < 2:
            return [names[node]]
        before = [p for p in self.parents[node] if self.depth[p] == self.depth[node] - 1 and (p < 2 or self.depth[p])]
        return [*min(self.shortest_path(p, names) for p in before), names[node]]


def grow(nodes: int, numbers: Iterator[int]) -> Graph:
    """Add nodes one by one, each below some earlier ones; roots and deeper nodes are likelier to become parents.

    Args:
        nodes: how many there will be.
        numbers: random numbers, `MOST_NUMBERS` per node.
    """
    parents: list[list[int]] = [[], []]
    depth, roots = [0, 0], [1, 2]  # roots: one bit for each root that reaches a node
    for node in range(2, nodes):
        count, side = bisect_right(IN_DEGREE, next(numbers) % 1000), next(numbers) % 100
        unwanted = 2 if side < SIDE else 1 if side < 2 * SIDE else 0
        candidates = [n for n in range(node) if not roots[n] & unwanted]
        weights = [9 * depth[n] + (4 if n < 2 else 1) for n in candidates]
        parents.append(_choose(candidates, weights, count, numbers))
        led_to = [n for n in parents[node] if roots[n]]
        depth.append(min((depth[n] + 1 for n in led_to), default=0))
        roots.append(reduce(or_, (roots[n] for n in led_to), 0))
    inner = {n for its in parents for n in its}
    ends = []
    for root in (1, 2):
        leaves = [n for n in range(2, nodes) if roots[n] == root and n not in inner]
        furthest = max(leaves, key=depth.__getitem__, default=0)
        if FEWEST_STEPS <= depth[furthest] <= MOST_STEPS:
            ends.append(furthest)
    return Graph(parents, depth, ends)


def _choose(items: list[int], weights: list[int], count: int, numbers: Iterator[int]) -> list[int]:
    """Choose up to `count` different items with probabilities proportional to `weights`; consumes both lists."""
    chosen = []
    for _ in range(min(count, len(items))):
        rest, place = next(numbers) % sum(weights), 0
        while rest >= weights[place]:
            rest -= weights[place]
            place += 1
        chosen.append(items.pop(place))
        weights.pop(place)
    return chosen
