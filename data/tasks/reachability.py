"""Generate reachability problems: which of two nodes of a directed graph can be reached from a root.

symbols   r b | b c | s d / d c r = [c]               from r, does one come to d or to c?
words     r is a b . Every b is a c . s is a d . Is r a d or c ? [c]
chain     ... / d c r = [b c | c]          ... Is r a d or c ? [r is a b . Every b is a c . c]

The graphs are like those of ProsQA (arXiv 2412.06769), spelled in symbols as in arXiv 2505.12514 or with one token for
each word. In none of the 300 validation problems of ProsQA is a leaf further from its root than the right answer, which
can therefore be told without reading the root. Here each candidate is the furthest leaf of its own root and either root
may be asked about: a model that does not read the root is right half the time.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from plumbline.data.indexed import Int64s
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.graphs import BAR, FIRST_NODE, edges_of, prompt_length, spell
from plumbline.data.tasks.task import DrawnTaskConfig, Example, answering

EVERY, IS, A, STOP, ASK, OR, QUESTION, FIRST_NAME = 1, 2, 3, 4, 5, 6, 7, 8
"""Words: every, is, a, a full stop, the "is" of the question, or, a question mark, then the names of the nodes."""

IN_DEGREE = (90, 530, 810, 920, 960, 985)
"""Of 1000 nodes, how many have 0, up to 1, ... up to 5 parents, where there are so many to choose from; the rest 6.

As `SIDE` and the weights in `grow`, a fit to the validation problems of ProsQA: tests hold it to their statistics.
"""

SIDE = 4
"""Of 10 nodes, how many choose parents that the first root alone leads to, and the second; the rest choose any."""

MOST_NUMBERS = 8
"""Random numbers for a node: its in-degree, its side, up to six parents."""

FEWEST_STEPS, MOST_STEPS = 3, 6
"""Steps from a root to its candidate; ProsQA has no others."""


class ReachabilityConfig(DrawnTaskConfig):
    """Configure reachability in a directed graph without cycles, whose edges and two candidates come in random order.

    Symbols: token 1 is |, 2 is /, 3 is =, then the nodes. Words: tokens 1 to 7 are the words, then the nodes.
    """

    name: Literal["reachability"] = "reachability"
    """Which task."""
    nodes: int = Field(default=25, ge=12, le=100)
    """Nodes that a graph grows to, and their names. Those that no edge touches, about two, are not to be seen. The
    statistics of ProsQA are those of 25."""
    form: Literal["symbols", "words"] = "symbols"
    """Edges as pairs of nodes, or sentences. "Every" stands before a node that has parents."""
    answer: Literal["node", "chain"] = "node"
    """node: the candidate that is reached. chain: the steps of a shortest path first, of several the one whose names
    have the lowest ids, then the candidate."""

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: padding, signs or words, and nodes."""
        return self._first + self.nodes

    @property
    def longest(self) -> int:
        """Return the most tokens that an example can have by its edges and steps; its last answer is not read."""
        if self.form == "symbols":
            prompt, chain = prompt_length(self._most_edges, 3), MOST_STEPS + 1
        else:
            prompt, chain = 6 * self._most_edges + 7, 6 * MOST_STEPS - 1
        return prompt + (chain if self.answer == "chain" else 0)

    @property
    def _first(self) -> int:
        return FIRST_NODE if self.form == "symbols" else FIRST_NAME

    @property
    def _most_edges(self) -> int:
        return 2 * self.nodes

    def draw(self, draws: Draws) -> Example:
        """Draw one random example."""
        graph = grow(self.nodes, iter(draws.numbers(MOST_NUMBERS * self.nodes)))
        while len(graph.ends) < 2 or sum(map(len, graph.parents)) > self._most_edges:
            graph = grow(self.nodes, iter(draws.numbers(MOST_NUMBERS * self.nodes)))
        names = draws.distinct(self.nodes, self.nodes).tolist()
        edges = np.array([(names[p], names[n]) for n, parents in enumerate(graph.parents) for p in parents], np.int64)
        edges = edges[draws.distinct(len(edges), len(edges))]
        asked, swapped = draws.integers(2, 2).tolist()
        path = graph.shortest_path(graph.ends[asked], names)
        candidates = [names[node] for node in (reversed(graph.ends) if swapped else graph.ends)]
        steps = path if self.answer == "chain" else []
        if self.form == "symbols":
            chain = [*(FIRST_NODE + node for node in steps[1:]), BAR] if steps else []
            answer = np.array([*chain, FIRST_NODE + path[-1]], np.int64)
            return spell(edges, (*candidates, path[0]), answer)
        return _spell_in_words(edges, candidates, path[0], steps, path[-1])

    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Ask about another root, from which the other candidate is reached."""
        edges, places = self.question_of(tokens)
        one, other, root = tokens[places].tolist()
        mine, theirs = ancestors(edges, one), ancestors(edges, other)
        if root in theirs:
            mine, theirs = theirs, mine
        others = sorted((theirs - mine).difference(edges[:, 1].tolist()))
        asked: Int64s = tokens.copy()
        asked[places[2]] = others[draws.integers(1, len(others))[0]]
        return asked

    def question_of(self, tokens: Int64s) -> "Question":
        """Return what the tokens of an example say."""
        if self.form == "symbols":
            edges = edges_of(tokens)
            return Question(edges, 3 * len(edges) + np.arange(3))
        question = int(np.argmax(tokens == ASK))
        stems = np.flatnonzero(tokens[:question] == IS)
        return Question(np.stack((tokens[stems - 1], tokens[stems + 2]), axis=1), question + np.array([3, 5, 1]))


class Question(NamedTuple):
    """Hold a graph by the tokens of its nodes, and what is asked about it."""

    edges: Int64s
    """[E, 2]: parent, child."""
    places: Int64s
    """[3]: where the text asks about one candidate, the other, and the root."""


class Graph(NamedTuple):
    """Hold a graph whose nodes 0 and 1 are the roots and whose edges lead from lower to higher numbers."""

    parents: list[list[int]]
    """The parents of each node."""
    depth: list[int]
    """For each node, the steps from the nearest root that leads to it; 0 where none does."""
    ends: list[int]
    """For each root the furthest leaf that only this root leads to, if it is 3 to 6 steps away; else none."""

    def shortest_path(self, node: int, names: Sequence[int]) -> list[int]:
        """Return the names from the root to a node that one root leads to; of several paths the first by the names."""
        if node < 2:
            return [names[node]]
        before = [p for p in self.parents[node] if self.depth[p] == self.depth[node] - 1 and (p < 2 or self.depth[p])]
        return [*min(self.shortest_path(p, names) for p in before), names[node]]


def grow(nodes: int, numbers: Iterator[int]) -> Graph:
    """Add nodes one by one, each below some earlier ones; deeper ones are likelier to become parents.

    Args:
        nodes: how many there will be.
        numbers: random numbers, `MOST_NUMBERS` for each node.
    """
    parents: list[list[int]] = [[], []]
    depth, roots = [0, 0], [1, 2]  # roots: one bit for each root that leads to a node
    for node in range(2, nodes):
        count, side = bisect_right(IN_DEGREE, next(numbers) % 1000), next(numbers) % 10
        wanted = 1 if side < SIDE else 2 if side < 2 * SIDE else None
        candidates = [n for n in range(node) if wanted is None or roots[n] == wanted]
        parents.append(_choose(candidates, [8 * depth[n] + 1 for n in candidates], count, numbers))
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
    """Choose up to `count` different items, likely in proportion to their weights; both lists are used up."""
    chosen = []
    for _ in range(min(count, len(items))):
        rest, place = next(numbers) % sum(weights), 0
        while rest >= weights[place]:
            rest -= weights[place]
            place += 1
        chosen.append(items.pop(place))
        weights.pop(place)
    return chosen


def _spell_in_words(edges: Int64s, candidates: Sequence[int], root: int, steps: Sequence[int], answer: int) -> Example:
    """Return the example of named edges [E, 2] in the order to be read; `steps` is the path to be answered, if any."""
    has_parents = set(edges[:, 1].tolist())

    def sentence(parent: int, child: int) -> list[int]:
        every = [EVERY] if parent in has_parents else []
        return [*every, FIRST_NAME + parent, IS, A, FIRST_NAME + child, STOP]

    one, other = (FIRST_NAME + node for node in candidates)
    text = [word for parent, child in edges.tolist() for word in sentence(parent, child)]
    text += [ASK, FIRST_NAME + root, A, one, OR, other, QUESTION]
    prompt = len(text)
    text += [word for parent, child in pairwise(steps) for word in sentence(parent, child)]
    text.append(FIRST_NAME + answer)
    return answering(np.array(text, np.int64), np.arange(len(text)) >= prompt)


def ancestors(edges: Int64s, node: int) -> set[int]:
    """Return a node and all from which it can be reached along the edges [E, 2]."""
    parents: dict[int, list[int]] = {}
    for parent, child in edges.tolist():
        parents.setdefault(child, []).append(parent)
    reached, waiting = {node}, [node]
    while waiting:
        for parent in parents.get(waiting.pop(), []):
            if parent not in reached:
                reached.add(parent)
                waiting.append(parent)
    return reached
