"""Every value of the learning rate follows from the step alone."""

import itertools
import math
from typing import Any

import pytest
from pydantic import ValidationError

from launcher.runtime.optimizer import set_learning_rates
from launcher.runtime.schedule import ScheduleConfig, lr_factor


def schedule(**values: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate(values)


def factors(config: ScheduleConfig, total: int) -> list[float]:
    return [lr_factor(config, step, total) for step in range(total)]


def test_wsd_values() -> None:
    config = schedule(name="wsd", warmup_steps=4, decay_fraction=0.3)
    expected = [0.25, 0.5, 0.75, 1.0, *[1.0] * 10, *[1 - k / 6 for k in range(6)]]
    assert factors(config, 20) == pytest.approx(expected, abs=1e-12)


def test_linear_values() -> None:
    config = schedule(name="linear", warmup_steps=2)
    assert factors(config, 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25], abs=1e-12)


def test_cosine_values() -> None:
    config = schedule(name="cosine", warmup_steps=2)
    expected = [0.5, 1.0, *[(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]]
    assert factors(config, 6) == pytest.approx(expected, abs=1e-12)


def test_constant_values() -> None:
    assert factors(schedule(name="constant", warmup_steps=2), 5) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear", "constant"])
def test_without_warmup_the_first_update_runs_at_the_peak(name: str) -> None:
    assert lr_factor(schedule(name=name), 0, 100) == 1.0


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear", "constant"])
def test_warmup_rises_evenly_to_the_peak_and_never_starts_at_zero(name: str) -> None:
    config = schedule(name=name, warmup_steps=10)
    assert factors(config, 100)[:11] == [*[(step + 1) / 10 for step in range(10)], 1.0]


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear"])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_the_decay_ends_just_after_the_last_update(name: str, final: float) -> None:
    config = schedule(name=name, warmup_steps=10, final_lr_fraction=final)
    values = factors(config, 100)
    assert lr_factor(config, 100, 100) == pytest.approx(final, abs=1e-12)
    assert values[-1] > final or final == 1.0, "no update is spent at the end value"
    assert all(after <= before for before, after in itertools.pairwise(values[10:]))
    assert min(values[10:]) >= final


def test_a_warmup_longer_than_the_run_and_a_decay_longer_than_what_is_left() -> None:
    assert factors(schedule(name="wsd", warmup_steps=10), 4) == [0.1, 0.2, 0.3, 0.4]
    config = schedule(name="wsd", warmup_steps=6, decay_fraction=1.0)
    assert factors(config, 10)[6:] == pytest.approx([1.0, 0.75, 0.5, 0.25], abs=1e-12)


def test_the_end_of_warmup_is_not_the_end_of_training() -> None:
    assert lr_factor(schedule(name="linear", warmup_steps=5), 5, 5) == 1.0  # nothing left to decay over


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear", "constant"])
def test_a_pure_function_of_the_step(name: str) -> None:
    config = schedule(name=name, warmup_steps=7)
    forward = factors(config, 50)
    assert [lr_factor(config, step, 50) for step in reversed(range(50))] == forward[::-1]


def test_the_factor_and_the_multipliers_commute() -> None:
    """Every group runs at its own multiple of one value, exactly: the ratios of the table hold at every step."""
    multipliers = [1.0, 0.5, 0.125, 2.0, 1 / 3]
    groups: list[dict[str, Any]] = [{"lr": 123.0, "lr_multiplier": m} for m in multipliers]
    for value in factors(schedule(warmup_steps=3), 20):
        set_learning_rates(groups, 4e-3 * value)
        assert [group["lr"] for group in groups] == [4e-3 * value * m for m in multipliers]
        set_learning_rates(groups, 4e-3 * value)  # writes, does not accumulate
        assert groups[1]["lr"] == groups[0]["lr"] / 2


@pytest.mark.parametrize(
    "values",
    [
        {"name": "step"},
        {"warmup_steps": -1},
        {"decay_fraction": 0.0},
        {"decay_fraction": 1.1},
        {"final_lr_fraction": -0.1},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        schedule(**values)
