"""Make the lines of metrics.jsonl that say how steps went, each once what its step reports has been read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plumbline.launcher.runtime.engine.step_result import StepResult, StepUnderWay
from plumbline.launcher.runtime.train.speed import SpeedMeter

WAITS = {"data_wait": "data_wait", "checkpoint": "checkpoint_stall"}
"""Buckets of the ledger in which a step is not made -> keys of the line for the seconds in them."""


@dataclass(frozen=True)
class MadeStep:
    """Remember a step until what it reports is read."""

    step: int
    tokens: int
    """Tokens of the run, with those of this step."""
    lr: float
    spent: Mapping[str, float]
    """Seconds of this process until the end of the step, by bucket of the ledger."""
    reports: StepUnderWay


class StepLines:
    """Make lines, each of what was since the line before.

    Args:
        names: of the reports of the objective.
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
        """Return the means of what the objective reports, without those that had no target."""
        rows = zip(self._names, reports.tolist(), strict=True)
        return {name: total / count for name, (total, count) in rows if count}
