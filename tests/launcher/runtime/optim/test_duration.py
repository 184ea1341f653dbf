"""A duration means the same in whichever unit and spelling it is written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.data.batch_plan import BatchPlan, BatchStage
from plumbline.launcher.runtime.optim.duration import Duration

BATCHES = BatchPlan(8, 4, (BatchStage(tokens=64, global_batch_size=2),))  # 8 steps of 8 tokens, then steps of 32


@pytest.mark.parametrize(
    ("written", "amount", "unit"),
    [
        ("40 steps", 40, "steps"),
        ("1 step", 1, "steps"),
        ("40steps", 40, "steps"),
        ("1e9 tokens", 10**9, "tokens"),
        ("1.5e3 tokens", 1500, "tokens"),
        ("2_000 tokens", 2000, "tokens"),
        ("2%", 0.02, "fraction"),
        ("29.9%", 0.299, "fraction"),
        ("0.299 fraction", 0.299, "fraction"),
        ("100%", 1.0, "fraction"),
    ],
)
def test_what_may_be_written(written: str, amount: float, unit: str) -> None:
    assert Duration.parse(written) == Duration(amount, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (40, "40 is no duration: write it like 40 steps, 1e9 tokens or 2%"),
        (None, "null is no duration"),
        (True, "true is no duration"),
        ("40", "'40' is no duration"),
        ("-1 steps", "'-1 steps' is no duration"),
        ("nan%", "'nan%' is no duration"),
        ("True steps", "'True steps' is no duration"),
        ("1.5 steps", "'1.5 steps' is no whole number of steps"),
        ("1e400 tokens", "'1e400 tokens' is longer than any run"),
        ("101%", "101%: a fraction lies between 0% and 100%"),
    ],
)
def test_what_may_not(written: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Duration.parse(written)


@given(st.floats(0.0, 1.0))
def test_a_fraction_survives_being_written_to_the_last_bit(fraction: float) -> None:
    written = str(Duration(fraction, "fraction"))
    assert written.endswith("%")
    assert Duration.parse(written).amount == fraction


@pytest.mark.parametrize(
    ("written", "from_start", "before_end", "end_step"),
    [
        ("3 steps", 24, 96, 13),  # steps of 8 tokens at the start, of 32 at the end
        ("9 steps", 96, 168, 19),
        ("48 tokens", 48, 48, 12),
        ("49 tokens", 49, 49, 12),
        ("50%", 96, 96, 12),  # half of 192; from step 10 on, half of 128: two steps
        ("40%", 64, 64, 12),
        ("0.0000001%", 0, 0, 11),  # a cooldown is at least one step
    ],
)
def test_it_is_counted_in_tokens_by_the_batches(written: str, from_start: int, before_end: int, end_step: int) -> None:
    duration = Duration.parse(written)
    total = BATCHES.tokens_before(12)
    assert total == 8 * 8 + 4 * 32 == 192
    assert duration.from_start(BATCHES, total) == from_start
    assert duration.before_end(BATCHES, 12) == before_end
    assert duration.end_step(BATCHES, 10) == end_step


def test_exactly_one_unit_is_given() -> None:
    assert Duration.one_of(steps=None, tokens=5) == Duration(5, "tokens")
    with pytest.raises(ValueError, match=r"steps = 3, tokens = 5: give one of them"):
        Duration.one_of(steps=3, tokens=5)
    with pytest.raises(ValueError, match=r"how long\? give steps or tokens or fraction"):
        Duration.one_of(steps=None, tokens=None, fraction=None)
