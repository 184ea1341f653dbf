"""Read ProsQA (arXiv 2412.06769): a JSON list of reachability problems in the format of the Coconut repository.

    r b | b c | s d / d c r = [c]               from r, does one come to d or to c?

An entry's `question` gives the edges and the candidates in their order ("Every lempus is a gorpus. ... Is Tom a lempus
or scrompus?"), `steps` the chain of the answer. `idx_to_symbol`, `edges`, `root`, `target` and `neg_target` state the
same by number, and both are compared.
"""

import re
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Len
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from plumbline.data.indexed import Int64s
from plumbline.data.order import derive_key
from plumbline.data.paths import HomePath
from plumbline.data.tasks.candidates import CandidatesConfig
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.task import Example, SplitName

STATEMENT = re.compile(r"(?:Every )?(\w+) is an? (\w+)")
QUESTION = re.compile(r"Is (\w+) an? (\w+) or (?:an? )?(\w+)\?")

ROOTS = (0, 1)
"""Nodes from which a file's graphs are grown, one of which is asked about; others may have no parents either."""


class ProsqaConfig(CandidatesConfig):
    """Configure the problems of one file of ProsQA, which are all for training or all for evaluation.

    Symbols: token 1 is |, 2 is /, 3 is =, then the names of nodes. Words: tokens 1 to 7 are the words, then the names.
    The chain is the file's. Each problem draws its node names at random, the same at every reading, since the file's
    own numbers reveal how deep a node lies.
    """

    name: Literal["prosqa"] = "prosqa"
    """Which task."""
    path: HomePath
    """The file: prosqa_train.json, prosqa_valid.json or prosqa_test.json of the Coconut repository, or one in the same
    format."""
    names: int = Field(default=32, ge=28, le=1000)
    """Number of node names, at least the nodes of the largest graph. Graphs use any of them. A model only knows the
    names it was trained on, so use the same number for all tasks of a model."""

    holds_out: ClassVar[bool] = False

    @property
    def most_names(self) -> int:
        """Return how many names of nodes there are, over all examples."""
        return self.names

    @property
    def most_steps(self) -> int:
        """Return the most steps from a root to its candidate."""
        return max(len(problem.path) - 1 for problem in self._problems)

    @property
    def longest(self) -> int:
        """Return the number of input tokens of the longest example."""
        return max(
            self.length_of(len(problem.edges), self.answer_length(len(problem.path) - 1)) for problem in self._problems
        )

    @property
    def fingerprint(self) -> str:
        """Return sixteen hex digits that hash the configuration and the file's content, not its path."""
        settings = self.model_dump(exclude={"path"}, exclude_none=True)
        return f"{derive_key(settings, read(self.path).digest):016x}"

    def num_examples(self, _split: SplitName) -> int:
        """Return the number of problems."""
        return len(self._problems)

    def example(self, _split: SplitName, number: int) -> Example:
        """Return problem `number` of the file, the same for either split."""
        problem = self._problems[number]
        draws = Draws(derive_key(self.name, self.seed, number))
        names = draws.distinct(problem.nodes, self.names)
        return self.spell(names[problem.edges], names[problem.candidates].tolist(), names[problem.path].tolist())

    def deeper_candidate(self, number: int) -> float:
        """Return the score, 1, 0 or 1/2, of choosing the deeper candidate, which does not need the root.

        The depth of a candidate is its distance from the nearer of the two roots from which the graph is grown.
        """
        problem = self._problems[number]
        far = [distances(problem.edges, root) for root in ROOTS]
        right = int(problem.path[-1])
        (wrong,) = set(problem.candidates.tolist()) - {right}
        mine, other = (min((found[node] for found in far if node in found), default=0) for node in (right, wrong))
        return 0.5 if mine == other else float(mine > other)

    @property
    def _problems(self) -> Sequence["Problem"]:
        """Return all problems of the file.

        Raises:
            ValueError: the file is malformed, or a graph has more nodes than there are names.
        """
        problems, largest, _ = read(self.path)
        if (nodes := problems[largest].nodes) > self.names:
            raise ValueError(
                f"{self.path}: example {largest}, idx_to_symbol: {nodes} nodes, but the task's names = {self.names}; "
                f"set names to {nodes} or more, in the other tasks of the run as well"
            )
        return problems


class Problem(NamedTuple):
    """Hold one problem with numbered nodes."""

    nodes: int
    """Number of nodes."""
    edges: Int64s
    """[E, 2]: (parent, child), in the order of the question."""
    candidates: Int64s
    """[2]: in the order of the question."""
    path: Int64s
    """[steps + 1]: the nodes from the root of the question to the candidate that it reaches."""


class ProblemFile(NamedTuple):
    """Hold the content of a file."""

    problems: list[Problem]
    largest: int
    """Number of the problem with the most nodes."""
    digest: str
    """Hash of its bytes."""


class Entry(BaseModel, frozen=True, strict=True):
    """Define the fields of one entry of a file; other fields are ignored."""

    question: str
    steps: Annotated[list[str], Len(1)]
    idx_to_symbol: Annotated[list[str], Len(2)]
    edges: Annotated[list[Annotated[list[int], Len(2, 2)]], Len(1)]
    root: int
    target: int
    neg_target: int

    def problem(self) -> Problem:
        """Return the problem that the entry states.

        Raises:
            FieldError: two fields contradict each other, or one is invalid.
        """
        numbers = {name: number for number, name in enumerate(self.idx_to_symbol)}
        if len(numbers) < len(self.idx_to_symbol):
            raise FieldError("idx_to_symbol", "two nodes have one name")
        *statements, question = re.split(r"(?<=\.) ", self.question)
        edges = [_edge_of("question", statement, numbers) for statement in statements]
        if sorted(edges) != sorted((parent, child) for parent, child in self.edges):
            raise FieldError("edges", "not those that the question states")
        asked = QUESTION.fullmatch(question)
        if asked is None:
            raise FieldError("question", f'ends in {question!r}, and not in "Is ROOT a NAME or NAME?"')
        root, *candidates = (numbers.get(name, -1) for name in asked.groups())
        if root != self.root:
            raise FieldError("root", f"{self.root} is not the node that the question asks about, {asked[1]}")
        if sorted(candidates) != sorted((self.target, self.neg_target)):
            key = "neg_target" if self.target in candidates else "target"
            raise FieldError(key, f"{getattr(self, key)} is not one of the two that the question asks about")
        path = self._path(numbers, set(edges))
        listed = np.array(edges, np.int64)
        if self.neg_target in distances(listed, self.root):
            raise FieldError("neg_target", f"{self.neg_target} can be reached from the root, too")
        return Problem(len(numbers), listed, np.array(candidates, np.int64), np.array(path, np.int64))

    def _path(self, numbers: dict[str, int], edges: set[tuple[int, int]]) -> list[int]:
        """Return the nodes of the steps, from the root to the target."""
        steps = [_edge_of("steps", step, numbers) for step in self.steps]
        joined = all(before[1] == after[0] for before, after in pairwise(steps))
        if not joined or (steps[0][0], steps[-1][1]) != (self.root, self.target) or not edges.issuperset(steps):
            raise FieldError("steps", "no way along the edges from the root to the target")
        return [self.root, *(child for _, child in steps)]


class FieldError(Exception):
    """State which field of an entry is wrong, and why."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")


@cache
def read(path: str) -> ProblemFile:
    """Read a file, once per process, so that the data of a run cannot change.

    Raises:
        ValueError: the file is missing or malformed; the message names the entry and its field.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); give task.path a prosqa_*.json of Coconut"
        ) from error
    try:
        entries = TypeAdapter(Annotated[list[Entry], Len(1)]).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _malformed(path, _in_words(first["loc"], first["msg"])) from error
    problems = []
    for number, entry in enumerate(entries):
        try:
            problems.append(entry.problem())
        except FieldError as error:
            raise _malformed(path, f"example {number}, {error}") from error
    largest = max(range(len(problems)), key=lambda number: problems[number].nodes)
    return ProblemFile(problems, largest, blake2b(content, digest_size=8).hexdigest())


def _in_words(location: tuple[int | str, ...], message: str) -> str:
    """Return pydantic's error in words, with the number of the entry, the field and the position within it."""
    if not location:
        return message
    number, *keys = location
    return f"example {number}, {'.'.join(map(str, keys))}: {message}" if keys else f"example {number}: {message}"


def _malformed(path: str, problem: str) -> ValueError:
    return ValueError(
        f"{path}: {problem}; a JSON list of problems is expected, each with question, steps, idx_to_symbol, edges, "
        "root, target and neg_target like those of prosqa_train.json of the Coconut repository"
    )


def _edge_of(field: str, text: str, numbers: dict[str, int]) -> tuple[int, int]:
    """Return the edge that a sentence states."""
    found = STATEMENT.fullmatch(text.removesuffix("."))
    if found is None:
        raise FieldError(field, f'{text!r} is not like "Every NAME is a NAME."')
    for name in found.groups():
        if name not in numbers:
            raise FieldError(field, f"{text!r} names {name}, which idx_to_symbol does not have")
    return numbers[found[1]], numbers[found[2]]


def distances(edges: Int64s, start: int) -> dict[int, int]:
    """Return the number of steps along the edges [E, 2] from `start` to each node that it reaches, itself included."""
    children: dict[int, list[int]] = {}
    for parent, child in edges.tolist():
        children.setdefault(parent, []).append(child)
    far, border = {start: 0}, [start]
    for node in border:
        for child in children.get(node, []):
            if child not in far:
                far[child] = far[node] + 1
                border.append(child)
    return far
