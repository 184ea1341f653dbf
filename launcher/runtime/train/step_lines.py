"""Make the lines of metrics.jsonl about steps, each after its step's results are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plumbline.launcher.runtime.engine.step_result import StepResult, StepUnderWay
from plumbline.launcher.runtime.train.speed import SpeedMeter

WAITS = {"data_wait": "data_wait", "checkpoint": "checkpoint_stall"}
"""Buckets of the ledger for time outside of steps -> keys of the line for their seconds."""


@dataclass(frozen=True)
class MadeStep:
    """Hold a step until its results are read."""

    step: int
    tokens: int
    """Tokens of the run, including this step."""
    lr: float
    spent: Mapping[str, float]
    """Seconds of this process up to the end of the step, by bucket of the ledger."""
    under_way: StepUnderWay


class StepLines:
    """Make lines, each about the time since the previous line.

    Args:
        names: names of the objective's reports.
        meter: measures speed.
    """

    def __init__(self, names: Sequence[str], meter: SpeedMeter) -> None:
        self._names, self._meter = names, meter
        self._spent: Mapping[str, float] = {}

    def line(self, made: MadeStep, result: StepResult) -> dict[str, Any]:
        """Return the line of a step."""
        before, self._spent = self._spent, made.spent
        speed = self._meter.read(made.step, result.done)
        return {
            "step": made.step,
            "tokens": made.tokens,
            "loss": result.loss.item(),
            "lr": made.lr,
            "grad_norm": result.grad_norm,
            **speed,
            "step_time": self._meter.step_seconds,
            **{key: made.spent[bucket] - before.get(bucket, 0.0) for bucket, key in WAITS.items()},
            **self._means(result.reports),
            **({} if result.applied else {"skipped": True}),
        }

    def _means(self, reports: Tensor) -> dict[str, float]:
        """Return the means of the objective's reports, without those that had no target."""
        rows = zip(self._names, reports.tolist(), strict=True)
        return {name: total / count for name, (total, count) in rows if count}
