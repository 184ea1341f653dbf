"""Choices between two candidates: what a model ends in by itself, and the rule that reads no root."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plumbline.data.loader import ValidationBatches
from plumbline.data.tasks.candidates import CandidatesConfig
from plumbline.data.tasks.graphs import BAR, EQUALS
from plumbline.data.tasks.prosqa import ProsqaConfig
from plumbline.data.tasks.reachability import ReachabilityConfig
from plumbline.data.tasks.source import TaskSource
from plumbline.launcher.runtime.scoring.greedy import decode_answers
from plumbline.launcher.runtime.scoring.scores import HeldOutLoss, held_out_loss

PROBLEM: dict[str, Any] = {
    "question": "Ann is a dax. Every dax is a wug. Every wug is a fep. Bob is a blick. Every blick is a toma. "
    "Is Ann a toma or fep?",
    "steps": ["Ann is a dax.", "Every dax is a wug.", "Every wug is a fep."],
    "idx_to_symbol": ["Ann", "Bob", "dax", "wug", "fep", "blick", "toma"],
    "edges": [[0, 2], [2, 3], [3, 4], [1, 5], [5, 6]],
    "root": 0,
    "target": 4,
    "neg_target": 6,
}
ANN, DAX, WUG, BOB, BLICK = 0, 3, 6, 9, 12
"""Places of first mention, of tokens `a b | b c | ...`."""


@pytest.fixture
def task(tmp_path: Path) -> ProsqaConfig:
    path = tmp_path / "problems.json"
    path.write_text(json.dumps([PROBLEM] * 3))
    return ProsqaConfig(path=str(path), answer="chain")


def walker(first: int, calls: list[Mapping[str, Any]]) -> Callable[..., Tensor]:
    """Return a model that says first the node at place `first`, then a child of what it read last, `|` at a leaf.

    After `|` it says the node before it.
    """

    def logits(batch: Mapping[str, Any], thinking: bool = False) -> Tensor:
        del thinking
        calls.append(batch)
        said = torch.zeros_like(batch["input_ids"])
        for row, tokens in enumerate(batch["input_ids"].tolist()):
            children = dict(zip(tokens[0:14:3], tokens[1:14:3], strict=True))
            for place, token in enumerate(tokens):
                follows = children.get(token, BAR)
                said[row, place] = tokens[first] if token == EQUALS else tokens[place - 1] if token == BAR else follows
        return F.one_hot(said, 36).float()

    return logits


def scores_of(task: CandidatesConfig, logits: Callable[..., Tensor], length: int = 0) -> HeldOutLoss:
    split = TaskSource(task).held_out
    scorer: Any = SimpleNamespace(logits=logits)
    return held_out_loss(scorer, ValidationBatches(split, length or task.longest, 2, 2), split)


@pytest.mark.parametrize("room", [0, 20])
@pytest.mark.parametrize(
    ("first", "exact_match", "answer_match", "accuracy"),
    [
        (DAX, 1.0, 1.0, 1.0),
        (WUG, 0.0, 1.0, 0.8),  # wug fep | fep: a step is left out
        (BLICK, 0.0, 0.0, 0.8),  # blick toma | toma: of the true tokens, which it reads, all but one are right
        (ANN, 0.0, 0.0, 0.8),  # Ann dax wug fep |: longer than any answer
    ],
)
def test_an_answer_is_matched_by_what_the_model_says_by_itself(
    task: ProsqaConfig, room: int, first: int, exact_match: float, answer_match: float, accuracy: float
) -> None:
    """Reading the true chain, the last token is right in every case: whoever reads it need not decide anything."""
    calls: list[Mapping[str, Any]] = []
    scores = scores_of(task, walker(first, calls), task.longest + room)
    assert (scores.exact_match, scores.own_means["answer_match"]) == (exact_match, answer_match)
    assert scores.accuracy == pytest.approx(accuracy)
    assert scores.examples == 3
    assert len(calls) == 2 * (1 if exact_match else task.longest_answer), "what is right already is not decoded"


def test_an_answer_without_steps_is_matched_exactly(task: ProsqaConfig) -> None:
    node = task.model_copy(update={"answer": "node"})
    for place, share in ((7, 1.0), (13, 0.0)):  # fep, toma
        calls: list[Mapping[str, Any]] = []
        scores = scores_of(node, walker(place, calls))
        assert scores.exact_match == scores.own_means["answer_match"] == share
        assert len(calls) == 2


def test_the_deeper_candidate_is_scored_on_the_same_examples_and_told(task: ProsqaConfig) -> None:
    scores = scores_of(task, walker(BLICK, []))
    assert scores.metrics("x")["eval/x/deeper_candidate"] == 1.0
    assert scores.metrics("x")["eval/x/answer_match"] == 0.0
    assert scores.describe().endswith(", accuracy 80.00%, answer match 0.00% (the deeper candidate: 100.00%)")


def test_where_the_deeper_candidate_is_a_guess_it_is_not_told() -> None:
    task = ReachabilityConfig(nodes=12, answer="chain")

    def silent(batch: Mapping[str, Any], thinking: bool) -> Tensor:
        del thinking
        return torch.zeros(*batch["labels"].shape, task.vocab_size)

    scores = scores_of(task, silent)
    assert scores.own_means == {"answer_match": 0.0, "deeper_candidate": None}
    assert scores.describe().endswith("answer match 0.00%")
    assert "eval/x/deeper_candidate" not in scores.metrics("x")


def test_ranks_decode_together(task: ProsqaConfig) -> None:
    """A rank whose own answers are all right makes the passes that another needs."""
    for wrong_elsewhere, passes in ((0.0, 1), (1.0, task.longest_answer)):
        calls: list[Mapping[str, Any]] = []
        split = TaskSource(task).held_out
        scorer: Any = SimpleNamespace(logits=walker(DAX, calls))
        batches = ValidationBatches(split, task.longest, 3)

        def reduce(sums: list[float], more: float = wrong_elsewhere) -> list[float]:
            return [sums[0] + more, *sums[1:]]

        scores = held_out_loss(scorer, batches, split, reduce=reduce)
        assert len(calls) == passes
        assert scores.own_means["answer_match"] == 1.0


def test_what_is_decoded_belongs_to_the_example_that_it_answers() -> None:
    """Rows of other lengths, one at its end, one without labels: only the true answer is overwritten."""
    tokens = torch.tensor([[5, 6, 9, 9, 0, 0, 0], [5, 5, 5, 5, 5, 5, 5], [5, 6, 7, 8, 9, 9, 9], [5, 6, 7, 8, 5, 5, 1]])
    labels = torch.full((4, 7), -100)
    labels[0, 1:4] = labels[2, 3:] = 9
    labels[3, 6] = 9
    documents, positions = torch.zeros(4, 7, dtype=torch.int32), torch.arange(7, dtype=torch.int32).repeat(4, 1)
    documents[0, 4:], positions[0, 4:] = 1, torch.arange(3, dtype=torch.int32)
    calls: list[Mapping[str, Any]] = []

    def count_up(batch: Mapping[str, Any]) -> Tensor:
        calls.append({name: tensor.clone() for name, tensor in batch.items()})
        following: Tensor = batch["input_ids"] + 1
        return following

    batch = {"input_ids": tokens, "labels": labels, "document_ids": documents, "positions": positions}
    before = {name: tensor.clone() for name, tensor in batch.items()}
    said = decode_answers(count_up, batch, count_up(batch), 5)
    assert said[0].tolist() == [7, 8, 9, 10, 11]
    assert said[2].tolist()[:4] == [9, 10, 11, 12]
    assert said[3].tolist()[:1] == [2]
    last = calls[-1]
    assert last["input_ids"].tolist()[0] == [5, 6, 7, 8, 9, 10, 0]
    assert last["input_ids"].tolist()[2:] == [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 5, 5, 1]]
    assert last["document_ids"][0].tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert last["positions"][0].tolist() == [0, 1, 2, 3, 4, 5, 2]
    assert last["labels"].equal(labels)
    assert all(batch[name].equal(before[name]) for name in batch)
