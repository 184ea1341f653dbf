"""Write and read questions about which of two candidates can be reached from a root of a directed graph.

symbols   r b | b c | s d / d c r = [c]               from r, does one come to d or to c?
words     r is a b . Every b is a c . s is a d . Is r a d or c ? [c]
chain     ... / d c r = [b c | c]          ... Is r a d or c ? [r is a b . Every b is a c . c]
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from plumbline.data.indexed import Int64s
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.graphs import BAR, FIRST_NODE, edges_of, prompt_length, spell
from plumbline.data.tasks.task import Example, OwnScore, OwnScores, TaskConfig, answering

EVERY, IS, A, STOP, ASK, OR, QUESTION, FIRST_NAME = 1, 2, 3, 4, 5, 6, 7, 8
"""Words: every, is, a, a full stop, the "is" of the question, or, a question mark, then the names of the nodes."""

SCORES = (
    OwnScore("answer_match", ", answer match {:.2%}", is_of_answers=True),
    OwnScore("deeper_candidate", " (the deeper candidate: {:.2%})", is_of_answers=False),
)
"""Whether the answer ends in the right candidate, whatever its steps; what a rule that reads no root would score."""


class CandidatesConfig(TaskConfig):
    """Configure a question about two candidates, of which exactly one can be reached from the root.

    Symbols: token 1 is |, 2 is /, 3 is =, then the names of nodes. Words: tokens 1 to 7 are the words, then the names.
    """

    form: Literal["symbols", "words"] = "symbols"
    """Edges as pairs of nodes, or as sentences. "Every" stands before a node that has parents."""
    answer: Literal["node", "chain"] = "node"
    """node: the candidate that is reached. chain: the steps to it, then the candidate."""

    @property
    @abstractmethod
    def most_names(self) -> int:
        """Return the number of node names used by all examples."""

    @property
    @abstractmethod
    def most_steps(self) -> int:
        """Return the most steps from a root to its candidate."""

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: padding, signs or words, and names."""
        return self._first + self.most_names

    @property
    def longest_answer(self) -> int:
        """Return the most tokens that an answer has."""
        return self.answer_length(self.most_steps)

    @property
    def _first(self) -> int:
        return FIRST_NODE if self.form == "symbols" else FIRST_NAME

    def answer_length(self, steps: int) -> int:
        """Return the number of tokens of an answer with `steps` steps."""
        if self.answer == "node":
            return 1
        return steps + 2 if self.form == "symbols" else 6 * steps

    def length_of(self, edges: int, answer: int) -> int:
        """Return the most input tokens of an example with this many edges and answer tokens, less the last answer."""
        prompt = prompt_length(edges, 3) if self.form == "symbols" else 6 * edges + 7
        return prompt + answer - 1

    def spell(self, edges: Int64s, candidates: Sequence[int], path: Sequence[int]) -> Example:
        """Return the example of a graph.

        Args:
            edges: [E, 2] names of parents and children, in reading order.
            candidates: the two candidates, in reading order.
            path: from the root of the question to the candidate that it reaches.
        """
        steps = path if self.answer == "chain" else []
        if self.form == "words":
            return _spell_in_words(edges, candidates, path[0], steps, path[-1])
        chain = [*(FIRST_NODE + node for node in steps[1:]), BAR] if steps else []
        return spell(edges, (*candidates, path[0]), np.array([*chain, FIRST_NODE + path[-1]], np.int64))

    def conclusion(self, answer: Sequence[int]) -> int | None:
        """Return the candidate at the end of an answer's tokens, whatever its steps, or None if it has no end."""
        if self.answer == "node":
            return answer[0]
        if self.form == "symbols":
            return next((token for before, token in pairwise(answer) if before == BAR), None)
        return next((token for before, token in pairwise(answer) if before == STOP and token >= FIRST_NAME), None)

    @property
    def own_scores(self) -> OwnScores:
        """Return the match of conclusions, and the score of the deeper candidate where that is no guess."""
        return OwnScores(SCORES, self.longest_answer, self._judge)

    def _judge(self, number: int, said: Sequence[int], answer: Sequence[int]) -> tuple[float, float]:
        deeper = self.deeper_candidate(number)
        return float(self.conclusion(said) == answer[-1]), math.nan if deeper is None else deeper

    def deeper_candidate(self, _number: int) -> float | None:
        """Return the score, 1, 0 or 1/2, of choosing the deeper candidate, which does not need the root.

        Return None if the task is constructed so that this is no better than a guess.
        """
        return None

    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Ask about the other root, from which the other candidate is reached."""
        edges, places = self.question_of(tokens)
        one, other, root = tokens[places].tolist()
        mine, theirs = ancestors(edges, one), ancestors(edges, other)
        if root in theirs:
            mine, theirs = theirs, mine
        others = sorted((theirs - mine).difference(edges[:, 1].tolist()))
        asked: Int64s = tokens.copy()
        if others:
            asked[places[2]] = others[draws.integers(1, len(others))[0]]
        return asked

    def question_of(self, tokens: Int64s) -> "Question":
        """Parse the tokens of an example."""
        if self.form == "symbols":
            edges = edges_of(tokens)
            return Question(edges, 3 * len(edges) + np.arange(3))
        question = int(np.argmax(tokens == ASK))
        stems = np.flatnonzero(tokens[:question] == IS)
        return Question(np.stack((tokens[stems - 1], tokens[stems + 2]), axis=1), question + np.array([3, 5, 1]))


class Question(NamedTuple):
    """Hold a graph, given by the tokens of its nodes, and the positions of the question."""

    edges: Int64s
    """[E, 2]: parent, child."""
    places: Int64s
    """[3]: positions in the text of the two candidates and the root."""


def _spell_in_words(edges: Int64s, candidates: Sequence[int], root: int, steps: Sequence[int], answer: int) -> Example:
    """Return the example of named edges [E, 2] in reading order; `steps` is the path to answer with, if any."""
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
    """Return a node and all nodes from which it can be reached along the edges [E, 2]."""
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
