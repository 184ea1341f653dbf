"""Tasks: every answer is right by a solver that sees only the tokens, and an example is a function of its number."""

from collections.abc import Iterator

import numpy as np
import pytest
from pydantic import ValidationError

from plumbline.data.config import SourceConfig
from plumbline.data.tasks.addition import AdditionConfig
from plumbline.data.tasks.induction import InductionConfig
from plumbline.data.tasks.kinds import AnyTaskConfig
from plumbline.data.tasks.maze import MazeConfig
from plumbline.data.tasks.memorization import MemorizationConfig
from plumbline.data.tasks.reachability import ReachabilityConfig
from plumbline.data.tasks.retrieval import RetrievalConfig
from plumbline.data.tasks.source import TaskSource
from plumbline.data.tasks.star_graph import StarGraphConfig
from plumbline.data.tasks.sudoku import SudokuConfig
from plumbline.data.tasks.task import Example, SplitName

SPLITS: tuple[SplitName, SplitName] = ("train", "validation")
RETRIEVAL = RetrievalConfig(pairs=5, queries=2, keys=7, values=3)
INDUCTION = InductionConfig(hops=3, length=24, symbols=4)
ADDITION = AdditionConfig(digits=3)
BACKWARDS = AdditionConfig(digits=20, order="most_first")
MEMORIZATION = MemorizationConfig(entries=50, symbols=8, values=5)
DRAWN: list[AnyTaskConfig] = [RETRIEVAL, INDUCTION, InductionConfig(length=4, symbols=20), ADDITION, BACKWARDS]
PLANNING: list[AnyTaskConfig] = [
    StarGraphConfig(arms=2, path_length=4, nodes=12, edge_order="child_first"),
    SudokuConfig(),
    MazeConfig(side=2),
    ReachabilityConfig(nodes=20),
    ReachabilityConfig(nodes=20, form="words", answer="chain"),
]
"""Solved in test_planning_tasks.py."""
TASKS = [*DRAWN, *PLANNING, MEMORIZATION]


def examples(task: AnyTaskConfig, count: int = 100) -> Iterator[Example]:
    for split in SPLITS:
        for number in range(min(count, task.num_examples(split))):
            yield task.example(split, number)


def retrieved(tokens: list[int]) -> list[int]:
    end = tokens.index(1)
    known = dict(zip(tokens[:end:2], tokens[1:end:2], strict=True))
    assert len(known) == end / 2, "the keys differ"
    asked = tokens[end + 1 :: 2]
    assert len(set(asked)) == len(asked)
    return [-100] * (end + 1) + [known[t] if place % 2 == 0 else -100 for place, t in enumerate(tokens[end + 1 :])]


def hopped(tokens: list[int], hops: int) -> list[int]:
    def answer(place: int) -> int:
        for _ in range(hops):
            earlier = [j for j in range(1, place + 1) if tokens[j - 1] == tokens[place]]
            if not earlier:
                return -100
            place = max(earlier)
        return tokens[place]

    return [answer(place) for place in range(len(tokens))]


def added(tokens: list[int], digits: int, order: str) -> list[int]:
    text = "".join({1: "+", 2: "="}.get(token) or str(token - 3) for token in tokens)
    left, right = text.partition("=")[0].split("+")
    assert len(left) == len(right) == digits
    turn = -1 if order == "least_first" else 1
    total = f"{int(left[::turn]) + int(right[::turn]):0{digits + 1}}"[::turn]
    assert total.startswith(text.partition("=")[2]), "what is read after = are the answers before"
    return [-100] * (2 * digits + 1) + [int(digit) + 3 for digit in total]


def solve(task: AnyTaskConfig, tokens: list[int]) -> list[int]:
    if isinstance(task, RetrievalConfig):
        return retrieved(tokens)
    if isinstance(task, InductionConfig):
        return hopped(tokens, task.hops)
    assert isinstance(task, AdditionConfig)
    return added(tokens, task.digits, task.order)


@pytest.mark.parametrize("task", DRAWN, ids=lambda task: task.name)
def test_every_answer_is_right(task: AnyTaskConfig) -> None:
    for tokens, labels in examples(task):
        assert labels.tolist() == solve(task, tokens.tolist())
        assert labels.max() >= 0, "there is something to learn in every example"


def test_the_map_to_memorize_is_one_map_with_even_values() -> None:
    task = MemorizationConfig(entries=2000, symbols=45, values=4)
    maps = [[task.example(split, number) for number in range(task.num_examples(split))] for split in SPLITS]
    table = {tuple(tokens.tolist()): labels.tolist() for tokens, labels in maps[0]}
    assert len(table) == 2000, "every key is another one"
    assert table == {tuple(tokens.tolist()): labels.tolist() for tokens, labels in maps[1]}
    assert {labels[0] for labels in table.values()} == {-100}
    counts = np.bincount([labels[1] for labels in table.values()], minlength=task.vocab_size)
    assert counts[:-4].sum() == 0
    assert 420 < counts[-4:].min() <= counts[-4:].max() < 580  # 500 each, give or take four standard deviations


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_documented_layout_is_used_in_full_and_no_example_is_longer_than_the_longest(task: AnyTaskConfig) -> None:
    drawn = list(examples(task))
    used = {int(token) for tokens, labels in drawn for token in [*tokens, *labels[labels >= 0]]}
    assert used == set(range(1, task.vocab_size))
    longest = max(len(tokens) for tokens, _ in drawn)
    assert longest <= task.longest
    if not isinstance(task, ReachabilityConfig):  # whose longest example is a rare one
        assert longest == task.longest
    assert all(tokens.dtype == labels.dtype == np.int64 for tokens, labels in drawn)


def test_retrieval_draws_every_number_of_pairs() -> None:
    pairs = [tokens.tolist().index(1) / 2 for tokens, _ in examples(RETRIEVAL, 300)]
    counts = [pairs.count(number) for number in range(1, 6)]
    assert sum(counts) == len(pairs)
    assert min(counts) > 80  # 120 each, give or take four standard deviations


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_an_example_is_a_function_of_its_number(task: AnyTaskConfig) -> None:
    """In any order, by any process: nothing is carried from one example to the next."""
    again = type(task).model_validate(task.model_dump())
    for split in SPLITS:
        forward = [task.example(split, number) for number in range(40)]
        backward = [again.example(split, number) for number in reversed(range(40))]
        for one, other in zip(forward, reversed(backward), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.labels.tolist() == other.labels.tolist()
        assert len({(*tokens.tolist(), *labels.tolist()) for tokens, labels in forward}) > 30


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_another_seed_is_another_task(task: AnyTaskConfig) -> None:
    other = task.model_copy(update={"seed": 1})
    assert other.fingerprint != task.fingerprint
    assert [e.labels.tolist() for e in examples(task, 20)] != [e.labels.tolist() for e in examples(other, 20)]


def test_examples_stay_what_they_are() -> None:
    """A change here is a change of every task: a resumed run would read other samples without a word."""
    assert ADDITION.example("train", 0).tokens.tolist() == [5, 11, 4, 1, 3, 7, 10, 2, 5, 5, 12]
    assert RETRIEVAL.example("validation", 10**6).tokens.tolist() == [5, 10, 7, 11, 4, 10, 1, 5, 10, 4]
    assert INDUCTION.example("train", 10**12).tokens.tolist()[:8] == [2, 4, 3, 4, 3, 4, 3, 4]
    assert MEMORIZATION.example("train", 9).labels.tolist() == [-100, 12]


def test_nothing_that_is_trained_on_is_held_out() -> None:
    """All hundred sums of two digits: each in one split, for every seed alike, and none in neither."""
    seen: dict[SplitName, set[tuple[int, ...]]] = {"train": set(), "validation": set()}
    for seed in (0, 1):
        task = AdditionConfig(digits=1, seed=seed)
        for split in SPLITS:
            seen[split] |= {tuple(task.example(split, number).tokens.tolist()[:3]) for number in range(600)}
    train, held_out = seen["train"], seen["validation"]
    assert not train & held_out
    assert len(train | held_out) == 100


@pytest.mark.parametrize("task", [*DRAWN, *PLANNING], ids=lambda task: task.name)
def test_one_example_in_sixteen_is_held_out(task: AnyTaskConfig) -> None:
    """So the training examples lack few of those that a plain stream would hold."""
    held_out = {tuple(task.example("validation", number).tokens.tolist()) for number in range(200)}
    assert len(held_out) > 100
    assert not held_out & {tuple(task.example("train", number).tokens.tolist()) for number in range(1000)}


@pytest.mark.parametrize("task", [*DRAWN, MEMORIZATION], ids=lambda task: task.name)
def test_another_question_leaves_the_labels_and_the_answers_that_are_read(task: AnyTaskConfig) -> None:
    changed = 0
    for number in range(50):
        example, other = task.example("validation", number), task.with_another_question("validation", number)
        assert other.labels.tolist() == example.labels.tolist()
        if not isinstance(task, InductionConfig):  # which reads no answers
            answers = np.flatnonzero(example.labels[:-1] >= 0) + 1
            assert other.tokens[answers].tolist() == example.tokens[answers].tolist()
        changed += other.tokens.tolist() != example.tokens.tolist()
    assert changed >= (35 if isinstance(task, RetrievalConfig) else 49), "a single pair leaves nothing else to ask for"


def test_other_questions_are_questions_of_the_task() -> None:
    """Other keys of the same pairs, other numbers around the same signs, another key of the same map."""
    for number in range(50):
        (tokens, _), (other, labels) = (
            make("train", number) for make in (RETRIEVAL.example, RETRIEVAL.with_another_question)
        )
        end = tokens.tolist().index(1)
        answers = retrieved(other.tolist())
        assert other[: end + 1].tolist() == tokens[: end + 1].tolist()
        assert [answer < 0 for answer in answers] == [label < 0 for label in labels]
        assert end == 2 or all(other[end + 1 :: 2] != tokens[end + 1 :: 2])

        other, _ = ADDITION.with_another_question("train", number)
        assert [place for place, token in enumerate(other) if token in (1, 2)] == [3, 7]
        assert all(3 <= token < 13 for token in np.delete(other, [3, 7]))

        keys = [MEMORIZATION.example("train", entry).tokens.tolist() for entry in range(50)]
        other, _ = MEMORIZATION.with_another_question("train", number)
        assert keys.index(other.tolist()) != number


def test_a_fingerprint_is_that_of_runs_made_before_examples_could_be_limited() -> None:
    kinds = (RetrievalConfig, InductionConfig, AdditionConfig, MemorizationConfig)
    assert [kind().fingerprint for kind in kinds] == [
        "9c81892f4295ebd4",
        "97254d2acf26e1a5",
        "1849e059f4a4dac3",
        "c502077d1dc570bb",
    ]
    assert ReachabilityConfig().fingerprint == "eec8de96641da536"  # 24edef8fb2aad41d drew other graphs


def test_a_fingerprint_covers_every_key() -> None:
    changes: list[dict[str, int]] = [{"queries": 1}, {"examples": 5}]
    tasks = [RETRIEVAL, *(RETRIEVAL.model_copy(update=change) for change in changes), ADDITION, BACKWARDS, MEMORIZATION]
    assert len({task.fingerprint for task in tasks}) == len(tasks)
    assert RetrievalConfig(pairs=5, queries=2, keys=7, values=3).fingerprint == RETRIEVAL.fingerprint


@pytest.mark.parametrize(
    "task", [RetrievalConfig(pairs=1, keys=1, values=2), InductionConfig(length=2, symbols=2, hops=4)]
)
def test_a_task_without_examples_to_hold_out_is_refused(task: AnyTaskConfig) -> None:
    with pytest.raises(ValueError, match=rf"task {task.name}: 16384 draws gave no validation example"):
        TaskSource(task)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, r"path = None, task = None: give exactly one of the two"),
        ({"path": "a", "task": {"name": "addition"}}, r"path = a, task = addition: give exactly one of the two"),
        ({"task": {"name": "retrieval", "pairs": 65}}, r"pairs = 65 exceeds keys = 64"),
        ({"task": {"name": "retrieval", "pairs": 2, "queries": 3}}, r"queries = 3 exceeds pairs = 2"),
        ({"task": {"name": "reachability", "names": 24}}, r"names = 24: every node has another one; .* nodes = 25"),
        ({"task": {"name": "memorization", "entries": 5, "symbols": 2}}, r"entries = 5: 2 symbols spell 4 keys of two"),
        (
            {"task": {"name": "sorting"}},
            r"'retrieval', 'induction', 'addition', 'memorization', 'star_graph', 'sudoku', 'maze', 'reachab",
        ),
    ],
)
def test_a_source_that_makes_no_sense_is_refused(source: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SourceConfig.model_validate(source)
