"""Files of ProsQA: read as they are written, named anew, and refused with the entry and the field that is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plumbline.data.config import DataConfig
from plumbline.data.loader import TrainBatches
from plumbline.data.opening import open_source
from plumbline.data.tasks.prosqa import ProsqaConfig
from plumbline.data.tasks.source import TaskSource
from tests.data.made import opened_splits

Entry = dict[str, Any]

DEEPER: Entry = {
    "question": "Ann is a dax. Every wug is a fep. Bob is a blick. Every dax is a wug. Every blick is a toma. "
    "Cid is a fep. Is Ann a toma or fep?",
    "answer": "Ann is a fep.",
    "steps": ["Ann is a dax.", "Every dax is a wug.", "Every wug is a fep."],
    "idx_to_symbol": ["Ann", "Bob", "dax", "wug", "fep", "blick", "toma", "Cid"],
    "edges": [[0, 2], [2, 3], [3, 4], [1, 5], [5, 6], [7, 4]],
    "root": 0,
    "target": 4,
    "neg_target": 6,
}
"""The target is three steps from its root, the other two."""
SHALLOWER: Entry = {
    **DEEPER,
    "question": DEEPER["question"].replace("Is Ann", "Is Bob"),
    "answer": "Bob is a toma.",
    "steps": ["Bob is a blick.", "Every blick is a toma."],
    "root": 1,
    "target": 6,
    "neg_target": 4,
}
EQUAL: Entry = {
    "question": "Every eft is an oak. Una is an eft. Vic is a gnu. Every gnu is a yak. Is Vic a yak or an oak?",
    "steps": ["Vic is a gnu.", "Every gnu is a yak."],
    "idx_to_symbol": ["Una", "Vic", "eft", "gnu", "oak", "yak"],
    "edges": [[0, 2], [1, 3], [2, 4], [3, 5]],
    "root": 1,
    "target": 5,
    "neg_target": 4,
}
WORDS = {1: "Every", 2: "is", 3: "a", 4: ".", 5: "Is", 6: "or", 7: "?"}
SIGNS = {1: "|", 2: "/", 3: "="}

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*entries: object, name: str = "problems.json") -> str:
        path = tmp_path / name
        path.write_text(json.dumps(list(entries)))
        return str(path)

    return write


def spelled(task: ProsqaConfig, entry: Entry, number: int) -> tuple[str, str]:
    """Return what is read before the answer and the answer, in the file's own names: each has one token of its own."""
    tokens, labels = task.example("train", number)
    edges = task.question_of(tokens).edges
    stated = [sentence.removeprefix("Every ").split() for sentence in entry["question"].split(". ")[: len(edges)]]
    names = dict(SIGNS if task.form == "symbols" else WORDS)
    for edge, (parent, *_, child) in zip(edges.tolist(), stated, strict=True):
        for token, name in zip(edge, (parent, child), strict=True):
            assert names.setdefault(token, name) == name
    assert len(set(names.values())) == len(names)
    start = int(np.argmax(labels >= 0))
    assert tokens[start + 1 :].tolist() == labels[start:-1].tolist()
    return tuple(" ".join(names[token] for token in part.tolist()) for part in (tokens[: start + 1], labels[start:]))  # type: ignore[return-value]


def test_a_problem_is_read_in_symbols_and_in_words(write: Write) -> None:
    path = write(DEEPER, EQUAL)
    symbols = ProsqaConfig(path=path, answer="chain")
    edges = "Ann dax | wug fep | Bob blick | dax wug | blick toma | Cid fep"
    assert spelled(symbols, DEEPER, 0) == (f"{edges} / toma fep Ann =", "dax wug fep | fep")
    assert spelled(symbols, EQUAL, 1) == ("eft oak | Una eft | Vic gnu | gnu yak / yak oak Vic =", "gnu yak | yak")
    words = ProsqaConfig(path=path, form="words", answer="chain")
    question = DEEPER["question"].replace(".", " .").replace("?", " ?")
    answer = "Ann is a dax . Every dax is a wug . Every wug is a fep . fep"
    assert spelled(words, DEEPER, 0) == (question, answer)
    for form in ("symbols", "words"):
        task = ProsqaConfig(path=path, form=form)
        assert spelled(task, DEEPER, 0)[1] == "fep"
        assert spelled(task, EQUAL, 1)[1] == "yak"


@pytest.mark.parametrize("form", ["symbols", "words"])
@pytest.mark.parametrize("answer", ["node", "chain"])
def test_the_sizes_are_those_of_the_file_and_the_names_those_of_the_configuration(
    write: Write, form: str, answer: str
) -> None:
    task = ProsqaConfig.model_validate({"path": write(DEEPER, SHALLOWER, EQUAL), "form": form, "answer": answer})
    found = [task.example("train", number) for number in range(3)]
    longest = max(len(example.tokens) for example in found)
    # Words are counted as if each sentence began with "Every", which half of them do
    assert task.longest == longest if form == "symbols" else longest <= task.longest <= longest + 4
    answers = [example.labels[example.labels >= 0].tolist() for example in found]
    assert task.longest_answer == max(map(len, answers))
    assert task.vocab_size == (4 if form == "symbols" else 8) + 32
    assert [task.conclusion(tokens) for tokens in answers] == [tokens[-1] for tokens in answers]
    assert task.num_examples("train") == task.num_examples("validation") == 3


def test_names_are_any_of_the_vocabulary_and_tell_nothing_of_depth(write: Write) -> None:
    """The file numbers its nodes from the roots on; with those numbers as names the roots would be the lowest."""
    task = ProsqaConfig(path=write(*[DEEPER] * 200), names=40)
    roots, used = [], set[int]()
    for number in range(200):
        tokens, labels = task.example("train", number)
        edges, places = task.question_of(tokens)
        roots.append(int(tokens[places[2]]))
        used |= set(edges.ravel().tolist())
        assert labels[-1] in tokens[places[:2]]
    assert used == set(range(4, 44))
    assert abs(np.mean(roots) - 23.5) < 4 * 11.5 / 200**0.5
    other_seed = task.model_copy(update={"seed": 1})
    assert other_seed.example("train", 0).tokens.tolist() != task.example("train", 0).tokens.tolist()


def test_the_deeper_candidate_is_told_from_the_two_roots(write: Write) -> None:
    """Cid, who has no parents either, is one step from fep and counts for nothing."""
    task = ProsqaConfig(path=write(DEEPER, SHALLOWER, EQUAL))
    assert [task.deeper_candidate(number) for number in range(3)] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("form", "answer", "tokens", "end"),
    [
        ("symbols", "chain", [9, 8, 1, 7, 5], 7),
        ("symbols", "chain", [9, 8, 7, 5], None),
        ("symbols", "chain", [9, 8, 1], None),
        ("words", "chain", [9, 2, 3, 8, 4, 1, 8, 2, 3, 10, 4, 10], 10),
        ("words", "chain", [9, 2, 3, 8, 4, 1, 8, 2, 3, 10, 4, 1], None),
        ("words", "chain", [9, 2, 3, 8, 10], None),
        ("symbols", "node", [9], 9),
    ],
)
def test_the_end_of_an_answer_is_what_follows_its_steps(
    form: str, answer: str, tokens: list[int], end: int | None
) -> None:
    task = ProsqaConfig.model_validate({"path": "unread", "form": form, "answer": answer})
    assert task.conclusion(tokens) == end


def test_another_question_is_answered_by_the_other_candidate(write: Write) -> None:
    task = ProsqaConfig(path=write(DEEPER))
    example, other = task.example("train", 0), task.with_another_question("train", 0)
    edges, places = task.question_of(example.tokens)
    assert np.flatnonzero(example.tokens != other.tokens).tolist() == [places[2]]
    assert other.tokens[places[2]] == edges[2, 0], "Bob"


def changed(**changes: object) -> Entry:
    return {**DEEPER, **changes}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({key: value for key, value in DEEPER.items() if key != "steps"}, "steps: Field required"),
        (changed(root="0"), "root: Input should be a valid integer"),
        (changed(edges=[[0, 2, 3]]), "edges.0: List should have at most 2 items"),
        (changed(steps=[]), "steps: List should have at least 1 item"),
        (changed(edges=DEEPER["edges"][1:]), "edges: not those that the question states"),
        (changed(question="Ann is dax. Is Ann a toma or fep?"), "question: 'Ann is dax.' is not like \"Every NAME"),
        (changed(question="Eve is a dax. Is Ann a toma or fep?"), "question: 'Eve is a dax.' names Eve, which idx_to"),
        (changed(question=DEEPER["question"].replace(" or fep", "")), "question: ends in 'Is Ann a toma?', and not in"),
        (changed(root=1), "root: 1 is not the node that the question asks about, Ann"),
        (changed(target=3), "target: 3 is not one of the two that the question asks about"),
        (changed(neg_target=3), "neg_target: 3 is not one of the two that the question asks about"),
        (changed(steps=DEEPER["steps"][:2]), "steps: no way along the edges from the root to the target"),
        (changed(steps=DEEPER["steps"][::2]), "steps: no way along the edges"),
        (changed(steps=["Ann is a wug.", "Every wug is a fep."]), "steps: no way along the edges"),
        (changed(steps=["Ann is the dax."]), "steps: 'Ann is the dax.' is not like"),
        (changed(target=6, neg_target=4), "steps: no way along the edges from the root to the target"),
        (changed(idx_to_symbol=["Ann", "Ann", *DEEPER["idx_to_symbol"][2:]]), "idx_to_symbol: two nodes have one name"),
        (
            {
                **DEEPER,
                "question": DEEPER["question"].replace("Is Ann a toma", "Is Ann a wug"),
                "neg_target": 3,
            },
            "neg_target: 3 can be reached from the root, too",
        ),
    ],
)
def test_a_wrong_entry_is_one_error_that_names_file_entry_and_field(write: Write, entry: Entry, message: str) -> None:
    path = write(EQUAL, entry)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        TaskSource(ProsqaConfig(path=path))
    assert str(caught.value).startswith(f"{path}: example 1, {message}")
    assert str(caught.value).endswith("like those of prosqa_train.json of the Coconut repository")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "Invalid JSON"),
        ("{}", "Input should be a valid array"),
        ("[]", "List should have at least 1 item"),
        ("[3]", "example 0: Input should be an object"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        TaskSource(ProsqaConfig(path=str(path)))
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: cannot be read \(No such file or directory\); give task\.path"):
        TaskSource(ProsqaConfig(path=str(tmp_path / "none.json")))


def test_more_nodes_than_names_are_refused(write: Write) -> None:
    chain = [f"n{number}" for number in range(40)]
    stated = [(f"{'Every ' if number else ''}n{number} is a n{number + 1}.") for number in range(39)]
    entry = {
        "question": f"{' '.join(stated)} m is a k. Is n0 a n39 or k?",
        "steps": stated,
        "idx_to_symbol": [*chain, "m", "k"],
        "edges": [*([number, number + 1] for number in range(39)), [40, 41]],
        "root": 0,
        "target": 39,
        "neg_target": 41,
    }
    path = write(DEEPER, entry)
    with pytest.raises(ValueError, match=r"example 1, idx_to_symbol: 42 nodes, but the task's names = 32; set names t"):
        TaskSource(ProsqaConfig(path=path))
    assert TaskSource(ProsqaConfig(path=path, names=42)).vocab_size == 46


def test_a_fingerprint_is_that_of_the_contents_wherever_they_lie(write: Write) -> None:
    """It is what a resume compares and what orders the samples."""
    path, copy, other = (
        write(*entries, name=name)
        for name, entries in {"a.json": [DEEPER], "b.json": [DEEPER], "c.json": [SHALLOWER]}.items()
    )
    task = ProsqaConfig(path=path)
    assert TaskSource(task).fingerprint == ProsqaConfig(path=copy).fingerprint
    changes: list[dict[str, object]] = [{"path": other}, {"seed": 1}, {"names": 33}, {"form": "words"}]
    others = {task.model_copy(update=change).fingerprint for change in changes}
    assert len({task.fingerprint, *others}) == 5


def data(train: list[Entry], validation: list[Entry] | None = None) -> DataConfig:
    return DataConfig.model_validate(
        {
            "train": train,
            "validation": validation or [],
            "sequence_length": 40,
            "global_batch_size": 2,
            "micro_batch_size": 2,
        }
    )


def test_all_of_a_file_is_trained_on_and_all_of_another_is_held_out(write: Write) -> None:
    train = {"task": {"name": "prosqa", "path": write(DEEPER, EQUAL, name="train.json")}}
    valid = {"task": {"name": "prosqa", "path": write(SHALLOWER, EQUAL, DEEPER, name="valid.json")}}
    config = data([train], [valid])
    assert TrainBatches(config, seed=1).epochs(1) == {"prosqa": 1.0}
    (split,) = opened_splits(config).values()
    assert split.evaluation_windows(40) == 3
    assert list(config.held_out_tasks) == ["prosqa"]
    assert open_source(config.validation[0]).held_out.evaluation_windows(40) == 3


def test_a_file_that_is_trained_on_is_not_what_is_held_out(write: Write) -> None:
    """It would be scored on what it has read."""
    train = {"task": {"name": "prosqa", "path": write(DEEPER, EQUAL)}}
    config = data([train, {"task": {"name": "reachability", "nodes": 12, "form": "symbols"}}]).model_copy(
        update={"sequence_length": 100}
    )
    assert list(opened_splits(config)) == list(config.held_out_tasks) == ["reachability"]
    assert not opened_splits(data([train]))
    assert not data([train]).held_out_tasks
