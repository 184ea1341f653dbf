"""Guards see every update and end a run that has nothing left to train; tests/distributed/test_endings.py has runs."""

from __future__ import annotations

import math

import pytest
import torch

from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.train.guards.guard import TrainingError
from plumbline.launcher.runtime.train.guards.non_finite import MAX_SKIPPED, NonFinite

TOTAL = 30


def result(norm: float = 1.0, applied: bool = True) -> StepResult:
    return StepResult(torch.tensor(2.0), norm, applied, torch.zeros(0, 2), flagged=False, done=0.0)


@pytest.fixture
def guard() -> NonFinite:
    return NonFinite(TOTAL)


def test_a_skipped_update_is_a_warning_and_no_time_for_a_checkpoint(
    guard: NonFinite, capsys: pytest.CaptureFixture[str]
) -> None:
    trusted = []
    for step, update in enumerate((result(), result(math.inf, applied=False), result()), start=1):
        guard.after_step(step, update)
        guard.after_logging({"step": step, "loss": 2.0 if update.applied else math.nan})
        trusted.append(guard.trusts_weights)
    assert trusted == [True, False, True]
    assert capsys.readouterr().err == "warning: step 2: gradient norm inf, update skipped\n"


def test_too_many_in_a_row_end_the_run(guard: NonFinite) -> None:
    for step in range(1, MAX_SKIPPED):
        guard.after_step(step, result(math.nan, applied=False))
    guard.after_step(MAX_SKIPPED, result())
    for step in range(1, MAX_SKIPPED):
        guard.after_step(MAX_SKIPPED + step, result(math.nan, applied=False))
    with pytest.raises(TrainingError, match=rf"step 20: .* {MAX_SKIPPED} update\(s\) in a row were skipped"):
        guard.after_step(2 * MAX_SKIPPED, result(math.nan, applied=False))


def test_the_last_update_may_not_be_skipped(guard: NonFinite) -> None:
    with pytest.raises(TrainingError, match=rf"step {TOTAL}: .* 1 update\(s\)"):
        guard.after_step(TOTAL, result(math.inf, applied=False))


def test_an_update_by_a_gradient_that_is_not_finite_ends_the_run(guard: NonFinite) -> None:
    with pytest.raises(TrainingError, match="step 3: the gradient norm is nan"):
        guard.after_step(3, result(math.nan))


def test_losses_are_looked_at_where_they_are_logged(guard: NonFinite) -> None:
    guard.after_logging({"step": 4, "loss": 2.0})
    with pytest.raises(TrainingError, match="step 5: the loss is inf"):
        guard.after_logging({"step": 5, "loss": math.inf})
    guard.after_evaluation({"step": 5, "eval/email/loss": math.nan})
    guard.after_evaluation({"step": TOTAL, "eval/email/loss": 2.0, "eval/email/perplexity": math.inf})
    with pytest.raises(TrainingError, match=rf"step {TOTAL}: eval/email/ema_loss is nan: .* remove it"):
        guard.after_evaluation({"step": TOTAL, "eval/email/loss": 2.0, "eval/email/ema_loss": math.nan})
