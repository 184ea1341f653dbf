"""Generate star graphs: the path from the centre to the end of one arm.

    a b | s a | c d | s c / s d = [s c d]            2 arms of 2 nodes, the source s, the goal d

This is path finding in a graph G(d, l) with N labels (Bachmann and Nagarajan, arXiv 2403.06963). Only the first step
after the source is a decision; each later one follows from the token before it. A model that does not plan takes the
right arm once in d times, and its loss stays at ln(d) / l.
"""

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field
from pydantic import model_validator as validator

from plumbline.data.indexed import Int64s
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.graphs import FIRST_NODE, asked_of, edges_of, prompt_length, spell
from plumbline.data.tasks.task import DrawnTaskConfig, Example


class StarGraphConfig(DrawnTaskConfig):
    """Configure path finding in a star.

    Token 1 is |, 2 is /, 3 is =, the labels follow; the edges come in random order.
    """

    name: Literal["star_graph"] = "star_graph"
    """Which task."""
    arms: int = Field(default=2, ge=2)
    """Arms of the star (d)."""
    path_length: int = Field(default=5, ge=2)
    """Nodes from the source to the goal, both included (l)."""
    nodes: int = Field(default=50, ge=3)
    """Number of labels (N); those of one graph are distinct."""
    edge_order: Literal["parent_first", "child_first"] = "parent_first"
    """How an edge is written. child_first makes it easy to look up a node's predecessor, and so to walk back."""
    target: Literal["forward", "reverse"] = "forward"
    """Whether the answer goes from the source to the goal, or from the goal to the source, where no step is a
    decision."""

    @validator(mode="after")
    def _check(self) -> "StarGraphConfig":
        if self.nodes < 1 + self._edges:
            raise ValueError(
                f"nodes = {self.nodes} labels are too few for arms = {self.arms} and path_length = {self.path_length}: "
                f"the graph has {1 + self._edges} nodes; raise nodes to {1 + self._edges} or more"
            )
        return self

    @property
    def _edges(self) -> int:
        return self.arms * (self.path_length - 1)

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: padding, three signs and labels."""
        return FIRST_NODE + self.nodes

    @property
    def longest(self) -> int:
        """Return the number of input tokens of every example; its last answer is not an input."""
        return prompt_length(self._edges, 2) + self.path_length - 1

    def draw(self, draws: Draws) -> Example:
        """Draw one random example."""
        labels = draws.distinct(1 + self._edges, self.nodes)
        arms = labels[1:].reshape(self.arms, self.path_length - 1)  # (d, l - 1)
        walks = np.concatenate((np.full((self.arms, 1), labels[0]), arms), axis=1)  # (d, l), each from the source
        edges = np.stack((walks[:, :-1], walks[:, 1:]), axis=2).reshape(-1, 2)  # (d (l - 1), 2)
        edges = edges[draws.distinct(self._edges, self._edges)]
        source, goal = int(walks[0, 0]), int(walks[0, -1])
        return spell(
            edges if self.edge_order == "parent_first" else edges[:, ::-1],
            (source, goal),
            FIRST_NODE + (walks[0] if self.target == "forward" else walks[0, ::-1]),
        )

    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Make the end of another arm the goal."""
        star = self.star_of(tokens)
        others = sorted(arm[-1] for arm in star.arms if arm[-1] != star.goal)
        asked: Int64s = tokens.copy()
        asked[prompt_length(self._edges, 2) - 2] = others[draws.integers(1, len(others))[0]]
        return asked

    def star_of(self, tokens: Int64s) -> "Star":
        """Parse the tokens of an example."""
        edges = edges_of(tokens)
        source, goal = asked_of(tokens).tolist()
        after: dict[int, list[int]] = {}
        for parent, child in (edges if self.edge_order == "parent_first" else edges[:, ::-1]).tolist():
            after.setdefault(parent, []).append(child)
        arms = [[first] for first in after[source]]
        for arm in arms:
            while arm[-1] in after:
                arm += after[arm[-1]]
        return Star(source, goal, arms)


class Star(NamedTuple):
    """Hold a star graph, given by the tokens of its nodes."""

    source: int
    goal: int
    arms: list[list[int]]
    """Nodes of each arm from the source's neighbour to the end, arms in the order of their first edges in the text."""
