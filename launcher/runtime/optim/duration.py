"""Represent a duration of training: a number of steps or tokens, or a fraction of a run."""

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BeforeValidator, InstanceOf, PlainSerializer

from plumbline.data.batch_plan import BatchPlan

Unit = Literal["steps", "tokens", "fraction"]
UNITS: tuple[Unit, ...] = ("steps", "tokens", "fraction")
WRITTEN = re.compile(r"\s*(\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(steps?|tokens?|fraction|%)\s*")
MOST = 10**18
"""Most steps or tokens: more than any run has, and small enough for a float."""


@dataclass(frozen=True)
class Duration:
    """Hold a length of training in one of three units.

    Attributes:
        amount: steps or tokens, a natural number; or a fraction in [0, 1].
        unit: which of the three.
    """

    amount: int | float
    unit: Unit

    def __post_init__(self) -> None:
        if self.unit == "fraction" and not 0 <= self.amount <= 1:
            raise ValueError(f"{self}: a fraction lies between 0% and 100%")

    def __str__(self) -> str:
        """Return a spelling that `parse` reads as an equal duration: 40 steps, 1000 tokens, 2.5%."""
        if self.unit == "fraction":
            return f"{(Decimal(repr(self.amount)) * 100).normalize():f}%"
        return f"{self.amount} {self.unit}"

    @classmethod
    def parse(cls, written: object) -> "Duration":
        """Read `40 steps`, `1e9 tokens` or `2%` (or `0.02 fraction`).

        Raises:
            ValueError: it is none of these, not a whole number of steps or tokens, over 100%, or longer than any run.
        """
        if isinstance(written, Duration):
            return written
        match = WRITTEN.fullmatch(written) if isinstance(written, str) else None
        if match is None:
            said = json.dumps(written) if written is None or isinstance(written, bool) else repr(written)  # as typed
            raise ValueError(f"{said} is no duration: write it like 40 steps, 1e9 tokens or 2%")
        number, unit = Decimal(match[1].replace("_", "")), match[2]
        if unit in ("%", "fraction"):
            return cls(float(number / 100 if unit == "%" else number), "fraction")
        if number > MOST:
            raise ValueError(f"{written!r} is longer than any run")
        if number != int(number):
            raise ValueError(f"{written!r} is no whole number of {unit.removesuffix('s')}s")
        return cls(int(number), "steps" if unit.startswith("step") else "tokens")

    @classmethod
    def one_of(cls, **given: int | float | None) -> "Duration":
        """Return the duration of the only unit that is given (not None).

        Raises:
            ValueError: none is given, or more than one.
        """
        known = {unit: amount for unit, amount in given.items() if amount is not None}
        if len(known) > 1:
            raise ValueError(f"{', '.join(f'{unit} = {amount}' for unit, amount in known.items())}: give one of them")
        if not known:
            raise ValueError(f"how long? give {' or '.join(given)}")
        ((name, amount),) = known.items()
        return cls(amount, next(unit for unit in UNITS if unit == name))

    def from_start(self, batch_plan: BatchPlan, total: int) -> int:
        """Return its length in tokens at the start of a run of `total` tokens; a fraction is rounded to full steps."""
        return batch_plan.tokens_before(int(self.amount)) if self.unit == "steps" else self._tokens(batch_plan, total)

    def before_end(self, batch_plan: BatchPlan, total_steps: int) -> int:
        """Return its length in tokens at the end of a run of `total_steps`; a fraction is rounded to full steps."""
        total = batch_plan.tokens_before(total_steps)
        if self.unit == "steps":
            return total - batch_plan.tokens_before(max(0, total_steps - int(self.amount)))
        return self._tokens(batch_plan, total)

    def steps_of(self, batch_plan: BatchPlan, total_steps: int) -> int:
        """Return its length in whole steps, rounded down, in a run of `total_steps`."""
        if self.unit == "steps":
            return int(self.amount)
        return self._tokens(batch_plan, batch_plan.tokens_before(total_steps)) // batch_plan.tokens_per_step

    def end_step(self, batch_plan: BatchPlan, first_step: int = 0) -> int:
        """Return the step at which it ends when it begins at `first_step`.

        Tokens are rounded up to whole steps, at least one. A fraction is of the tokens consumed until `first_step`.
        """
        if self.unit == "steps":
            return first_step + int(self.amount)
        start = batch_plan.tokens_before(first_step)
        tokens = int(self.amount) if self.unit == "tokens" else max(1, round(self.amount * start))
        return batch_plan.steps_for(start + tokens)

    def _tokens(self, batch_plan: BatchPlan, total: int) -> int:
        if self.unit == "tokens":
            return int(self.amount)
        return round(self.amount * (total / batch_plan.tokens_per_step)) * batch_plan.tokens_per_step


DurationKey = Annotated[InstanceOf[Duration], BeforeValidator(Duration.parse), PlainSerializer(str)]
"""A duration as a key of the configuration: text in YAML, a Duration after validation."""
