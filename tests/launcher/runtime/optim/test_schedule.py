"""Every value of the learning rate follows from the tokens consumed alone."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from plumbline.data.batch_plan import BatchPlan, BatchStage
from plumbline.launcher.runtime.optim.duration import Duration
from plumbline.launcher.runtime.optim.optimizer import set_learning_rates
from plumbline.launcher.runtime.optim.schedule import COOLDOWNS, SHAPES, Schedule, ScheduleConfig, Shape

PLAN = BatchPlan(batch_size=6, sequence_length=7)
STEP = 42  # tokens
EVERY = [*SHAPES]


def schedule(**values: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate(values)


def factors(config: ScheduleConfig, total: int) -> list[float]:
    whole = Schedule(config, PLAN, total)
    return [whole.factor(STEP * step) for step in range(total)]


def factor_at(config: ScheduleConfig, step: int, total: int) -> float:
    return Schedule(config, PLAN, total).factor(STEP * step)


def test_wsd_values() -> None:
    config = schedule(name="wsd", warmup="4 steps", decay="30%")
    expected = [0.25, 0.5, 0.75, 1.0, *[1.0] * 10, *[1 - k / 6 for k in range(6)]]
    assert factors(config, 20) == pytest.approx(expected, abs=1e-12)


def test_linear_values() -> None:
    config = schedule(name="linear", warmup="2 steps")
    assert factors(config, 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25], abs=1e-12)


def test_cosine_values() -> None:
    config = schedule(name="cosine", warmup="2 steps")
    expected = [0.5, 1.0, *[(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]]
    assert factors(config, 6) == pytest.approx(expected, abs=1e-12)


def test_constant_values() -> None:
    assert factors(schedule(name="constant", warmup="2 steps"), 5) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("cooldown", "final", "expected"),
    [
        ("linear", 0.0, [1.0, 0.75, 0.5, 0.25]),
        ("one_minus_sqrt", 0.0, [1.0, 0.5, 0.2928932188134524, 0.1339745962155614]),
        ("cosine", 0.0, [1.0, 0.8535533905932737, 0.5, 0.1464466094067262]),
        ("square", 0.0, [1.0, 0.9375, 0.75, 0.4375]),
        ("linear", 0.2, [1.0, 0.8, 0.6, 0.4]),
        ("one_minus_sqrt", 0.2, [1.0, 0.6, 0.434314575050762, 0.307179676972449]),
        ("square", 0.2, [1.0, 0.95, 0.8, 0.55]),
        ("exponential", 0.0625, [1.0, 0.5, 0.25, 0.125]),
        ("exponential", 1.0, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_cooldown_values(cooldown: str, final: float, expected: list[float]) -> None:
    config = schedule(cooldown=cooldown, final_lr_fraction=final, decay="4 steps", warmup="2 steps")
    assert factors(config, 8) == pytest.approx([0.5, 1.0, 1.0, 1.0, *expected], abs=1e-12)


@pytest.mark.parametrize("final", [0.01, 0.3])
@pytest.mark.parametrize("cooldown", COOLDOWNS)
def test_a_cooldown_leaves_the_peak_and_reaches_its_end_without_a_jump(cooldown: str, final: float) -> None:
    """Steps of one token: the largest change is what a shape's steepest slope allows."""
    whole = Schedule(
        schedule(cooldown=cooldown, final_lr_fraction=final, decay="10_000 tokens", warmup="5_000 tokens"),
        BatchPlan(1, 1),
        20_000,
    )
    assert (whole.warmup_end, whole.decay_start, whole.end) == (5_000, 10_000, 20_000)
    values = [whole.factor(tokens) for tokens in range(20_001)]
    assert (values[5_000], values[10_000]) == (1.0, 1.0)
    assert values[20_000] == pytest.approx(final, abs=1e-12)
    changes = [abs(after - before) for before, after in itertools.pairwise(values)]
    assert max(changes) <= (0.0101 if cooldown == "one_minus_sqrt" else 0.0005), "sqrt(1 / 10,000) at its first token"


@pytest.mark.parametrize(
    ("cooldown", "mean"),
    [
        ("linear", 1 / 2),
        ("one_minus_sqrt", 1 / 3),
        ("cosine", 1 / 2),
        ("square", 2 / 3),
        ("exponential", (1 - 0.1) / math.log(1 / 0.1)),
    ],
)
def test_the_area_under_a_cooldown_is_that_of_its_formula(cooldown: str, mean: float) -> None:
    """What the whole run learns at: half the warm-up, all of the peak, the integral of the shape."""
    final = 0.1 if cooldown == "exponential" else 0.0
    config = schedule(cooldown=cooldown, final_lr_fraction=final, warmup="2000 steps", decay="3000 steps")
    assert sum(factors(config, 10_000)) == pytest.approx(1000 + 5000 + 3000 * mean, abs=1.1)


@settings(deadline=None)
@given(
    name=st.sampled_from(("wsd", "cosine", "linear", "constant")),
    warmup=st.integers(0, 60),
    fraction=st.floats(0.001, 1.0),
    final=st.floats(0.0, 1.0),
    total=st.integers(1, 100_000),
    place=st.floats(0.0, 0.999999),
    batch=st.integers(1, 10**7),
)
def test_with_a_constant_batch_it_is_the_formula_in_steps_to_the_last_bit(
    name: str, warmup: int, fraction: float, final: float, total: int, place: float, batch: int
) -> None:
    config = schedule(name=name, warmup=f"{warmup} steps", decay=f"{fraction} fraction", final_lr_fraction=final)
    step = int(place * total)
    decay = min(total - warmup, round(fraction * total)) if name == "wsd" else total - warmup
    progress = max(0.0, (step - (total - decay)) / max(1, decay))
    remaining = (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress
    expected = 1.0 if name == "constant" else final + (1 - final) * remaining
    if step < warmup:
        expected = (step + 1) / warmup
    assert Schedule(config, BatchPlan(batch, 3), total).factor(step * batch * 3) == expected


@pytest.mark.parametrize(
    "same",
    [
        {"warmup": "10 steps", "decay": "30 steps"},
        {"warmup": f"{10 * STEP} tokens", "decay": f"{30 * STEP} tokens"},
        {"warmup": "10%", "decay": "30%"},
        {"warmup": f"{10 * STEP} tokens", "decay": "29.9%"},
    ],
)
def test_steps_tokens_and_fractions_say_the_same(same: dict[str, Any]) -> None:
    assert factors(schedule(**same), 100) == factors(schedule(warmup="10 steps", decay="30%"), 100)


def test_durations_in_tokens_need_not_be_whole_steps() -> None:
    config = schedule(warmup=f"{2 * STEP + 21} tokens", decay=f"{STEP + 21} tokens")
    expected = [1 / 2.5, 2 / 2.5, 1.0, 1.0, 1.0, 1 - 0.5 / 1.5]
    assert factors(config, 6) == pytest.approx(expected, abs=1e-12)


def test_what_is_not_given_is_written_down() -> None:
    """So a saved configuration says what its run did, and loads again."""
    assert schedule().model_dump().items() >= {"warmup": "0 steps", "decay": "20%"}.items()
    config = schedule(warmup="5 tokens", decay="3 steps")
    assert (config.warmup, config.decay) == (Duration(5, "tokens"), Duration(3, "steps"))
    for saved in (schedule(), config):
        assert schedule(**saved.model_dump()) == saved


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"cooldown": "exponential"},
            "final_lr_fraction = 0.0: an exponential cooldown never gets there; set it above 0",
        ),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        schedule(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "total", "text"),
    [
        (
            {"warmup": "2 steps", "cooldown": "square", "final_lr_fraction": 0.1},
            1000,
            "wsd: warm-up to step 2, peak to step 800, square decay to 0.1 of the peak at step 1,000",
        ),
        ({"name": "cosine"}, 9, "cosine: cosine decay to 0 of the peak at step 9"),
        ({"name": "constant", "warmup": "3 steps"}, 9, "constant: warm-up to step 3, peak to step 9"),
    ],
)
def test_the_phases_are_described(values: dict[str, Any], total: int, text: str) -> None:
    assert Schedule(schedule(**values), PLAN, total).describe() == text


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_the_cooldown_is_wsds_alone(name: str) -> None:
    assert factors(schedule(name=name, cooldown="square", decay="3 steps"), 9) == factors(schedule(name=name), 9)


@pytest.mark.parametrize("name", EVERY)
def test_a_branch_cools_down_from_its_parents_peak_whatever_the_parents_schedule(name: str) -> None:
    branch = {"checkpoint": "parent/step_00000020", "steps": 4, "from_step": 20}
    config = schedule(name=name, warmup="90%", decay="2 steps", cooldown="square", branch=branch)
    assert config.branch is not None
    whole = Schedule(config, PLAN, config.branch.last_step(PLAN))
    assert [whole.factor(STEP * step) for step in range(20, 25)] == [1.0, 0.9375, 0.75, 0.4375, 0.0]


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_without_a_stable_phase_the_peak_is_one_point(name: str) -> None:
    whole = Schedule(schedule(name=name, warmup="7 steps"), PLAN, 50)
    assert whole.warmup_end == whole.decay_start == 7 * STEP


def test_with_a_growing_batch_durations_are_tokens() -> None:
    """Batches of 2, 2, 4, 4, 4, then 8 of one token each: the rate goes by the tokens, not by the steps."""
    stages = (BatchStage(tokens=4, global_batch_size=2), BatchStage(tokens=12, global_batch_size=4))
    plan = BatchPlan(8, 1, stages)
    starts = [plan.tokens_before(step) for step in range(10)]
    assert starts == [0, 2, 4, 8, 12, 16, 24, 32, 40, 48]
    config = schedule(warmup="3 steps", decay="2 steps")  # 8 tokens; the last 16 of 48
    rates = [Schedule(config, plan, 9).factor(tokens) for tokens in starts]
    assert rates == [2 / 8, 4 / 8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    config = schedule(warmup="12 tokens", decay="60%")  # 28.8 tokens, rounded to 4 steps of the full batch
    rates = [Schedule(config, plan, 9).factor(tokens) for tokens in starts]
    assert rates == [2 / 12, 4 / 12, 8 / 12, 1.0, 1.0, 1.0, 24 / 32, 16 / 32, 8 / 32, 0.0]


def test_the_rate_follows_the_root_of_the_batch_size_only_where_it_is_asked_to() -> None:
    stages = (BatchStage(tokens=4, global_batch_size=2), BatchStage(tokens=12, global_batch_size=4))
    plan = BatchPlan(8, 1, stages)
    starts = [plan.tokens_before(step) for step in range(8)]
    assert [Schedule(schedule(name="constant"), plan, 8).factor(tokens) for tokens in starts] == [1.0] * 8
    scaled = Schedule(schedule(name="constant", lr_scaling="sqrt"), plan, 8)
    expected = [math.sqrt(size / 8) for size in (2, 2, 4, 4, 4, 8, 8, 8)]
    assert [scaled.factor(tokens) for tokens in starts] == expected
    warm = Schedule(schedule(name="constant", lr_scaling="sqrt", warmup="8 tokens"), plan, 8)
    assert [warm.factor(tokens) for tokens in starts[:3]] == [0.25 * expected[0], 0.5 * expected[0], expected[2]]


@pytest.mark.parametrize("name", EVERY)
def test_without_warmup_the_first_update_runs_at_the_peak(name: str) -> None:
    assert factor_at(schedule(name=name), 0, 100) == 1.0


def test_a_shape_is_one_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "falling", Shape("all the way", "square"))
    monkeypatch.setitem(SHAPES, "late", Shape("at the end", "cosine"))
    assert factors(schedule(name="falling"), 4) == pytest.approx([1, 1 - 1 / 16, 1 - 4 / 16, 1 - 9 / 16])
    assert factors(schedule(name="late", decay="2 steps"), 4) == pytest.approx([1, 1, 1, 0.5])
    assert Schedule(schedule(name="falling"), PLAN, 4).describe() == "falling: square decay to 0 of the peak at step 4"


@pytest.mark.parametrize("name", EVERY)
def test_warmup_rises_evenly_to_the_peak_and_never_starts_at_zero(name: str) -> None:
    config = schedule(name=name, warmup="10 steps")
    assert factors(config, 100)[:11] == [*[(step + 1) / 10 for step in range(10)], 1.0]


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear"])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_the_decay_ends_just_after_the_last_update(name: str, final: float) -> None:
    config = schedule(name=name, warmup="10 steps", final_lr_fraction=final)
    values = factors(config, 100)
    assert factor_at(config, 100, 100) == pytest.approx(final, abs=1e-12)
    assert values[-1] > final or final == 1.0, "no update is spent at the end value"
    assert all(after <= before for before, after in itertools.pairwise(values[10:]))
    assert min(values[10:]) >= final


def test_a_warmup_longer_than_the_run_and_a_decay_longer_than_what_is_left() -> None:
    assert factors(schedule(name="wsd", warmup="10 steps"), 4) == [0.1, 0.2, 0.3, 0.4]
    config = schedule(name="wsd", warmup="6 steps", decay="100%")
    assert factors(config, 10)[6:] == pytest.approx([1.0, 0.75, 0.5, 0.25], abs=1e-12)


def test_the_end_of_warmup_is_not_the_end_of_training() -> None:
    assert factor_at(schedule(name="linear", warmup="5 steps"), 5, 5) == 1.0  # nothing left to decay over


@pytest.mark.parametrize("name", EVERY)
def test_a_pure_function_of_the_tokens(name: str) -> None:
    config = schedule(name=name, warmup="7 steps")
    forward = factors(config, 50)
    assert [factor_at(config, step, 50) for step in reversed(range(50))] == forward[::-1]


def test_the_factor_and_the_multipliers_commute() -> None:
    """Every group runs at its own multiple of one value, exactly: the ratios of the table hold at every step."""
    multipliers = [1.0, 0.5, 0.125, 2.0, 1 / 3]
    groups: list[dict[str, Any]] = [{"lr": 123.0, "lr_multiplier": m} for m in multipliers]
    for value in factors(schedule(warmup="3 steps"), 20):
        set_learning_rates(groups, 4e-3 * value)
        assert [group["lr"] for group in groups] == [4e-3 * value * m for m in multipliers]
        set_learning_rates(groups, 4e-3 * value)  # writes, does not accumulate
        assert groups[1]["lr"] == groups[0]["lr"] / 2


@pytest.mark.parametrize(
    "values",
    [
        {"name": "step"},
        {"warmup": "-1 steps"},
        {"decay": "0%"},
        {"decay": "110%"},
        {"decay": "0 steps"},
        {"warmup": "-1 tokens"},
        {"warmup": "110%"},
        {"cooldown": "sqrt"},
        {"final_lr_fraction": -0.1},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        schedule(**values)
