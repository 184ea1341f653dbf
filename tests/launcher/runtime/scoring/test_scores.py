"""Scores: intervals, and what becomes of exact match when another question is asked."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plumbline.data.loader import ValidationBatches
from plumbline.data.tasks.kinds import AnyTaskConfig
from plumbline.data.tasks.source import TaskSource
from plumbline.data.tasks.star_graph import StarGraphConfig
from plumbline.launcher.runtime.scoring.scores import HeldOutLoss, held_out_loss, wilson_interval

STAR = StarGraphConfig(arms=2, path_length=3, nodes=8)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.27753),
        (10, 10, 0.72247, 1.0),
        (5, 10, 0.23659, 0.76341),
        (81, 263, 0.25529, 0.36621),  # Newcombe 1998, table I
        (1, 29, 0.00611, 0.17176),  # the same
    ],
)
def test_a_wilson_interval_is_the_one_of_the_tables(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=6e-5)


def test_a_wilson_interval_stays_between_zero_and_one() -> None:
    for trials in (1, 7, 4096, 10**6):
        low, high = wilson_interval(0, trials)
        assert low == 0.0 < high < 1.0
        assert wilson_interval(trials, trials) == pytest.approx((1 - high, 1.0))
        assert max(wilson_interval(trials, trials)) <= 1.0


def test_an_interval_is_told_and_can_be_had_from_what_is_logged() -> None:
    scores = HeldOutLoss(0.5, 1.6, None, 400, examples=100, exact_match=0.25, accuracy=0.5)
    assert scores.describe() == "0.5000, exact match 25.00% [17.55%, 34.30%], accuracy 50.00%"
    assert scores.metrics("x") == {
        "eval/x/loss": 0.5,
        "eval/x/perplexity": 1.6,
        "eval/x/tokens": 400,
        "eval/x/examples": 100,
        "eval/x/exact_match": 0.25,
        "eval/x/accuracy": 0.5,
    }
    assert HeldOutLoss(0.5, 1.6, 2.0, 400).describe() == "0.5000, 2.0000 bits per byte"


def walk(tokens: list[int], goal: int) -> list[int]:
    """Return the answer to a star graph of arms of two nodes, by its edges."""
    end = tokens.index(2)
    parent = dict(zip(tokens[1:end:3], tokens[0:end:3], strict=True))
    return [parent[parent[goal]], parent[goal], goal]


def scores_of(stream_changes: dict[str, Any], task: AnyTaskConfig, reads_the_goal: bool) -> HeldOutLoss:
    """Score a model that walks to the goal it reads, or else to the end of the arm that is listed first."""

    def logits(batch: Mapping[str, Any], thinking: bool) -> Tensor:
        assert not thinking
        found = torch.zeros(*batch["labels"].shape, task.vocab_size)
        for row, tokens in enumerate(batch["input_ids"].tolist()):
            parents, children = (set(tokens[start:12:3]) for start in (0, 1))
            goal = tokens[13] if reads_the_goal else next(node for node in tokens[1:12:3] if node not in parents)
            assert goal in children
            found[row, 14:17] = F.one_hot(torch.tensor(walk(tokens, goal)), task.vocab_size).float()
        return found

    split = replace(TaskSource(task).splits["validation"], **stream_changes)
    scorer: Any = SimpleNamespace(logits=logits)
    return held_out_loss(scorer, ValidationBatches(split, task.longest, 32, 16), split)


def test_who_reads_the_question_fails_under_another_and_who_guesses_does_not() -> None:
    reader, guesser = (
        [scores_of(changes, STAR, reads).exact_match for changes in ({}, {"another_question": True})]
        for reads in (True, False)
    )
    assert reader == [1.0, 0.0]
    assert guesser[0] == guesser[1] == pytest.approx(0.5, abs=0.09)


def test_the_interval_is_that_of_the_examples() -> None:
    scores = scores_of({}, STAR, reads_the_goal=False)
    assert scores.exact_match is not None
    assert scores.exact_match_interval == wilson_interval(round(scores.exact_match * 512), 512)
