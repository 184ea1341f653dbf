"""Guards see every update, and send back or end a run; tests/distributed/test_rollback.py has runs."""

from __future__ import annotations

import json
import math
import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.guards import (
    GradientSpikeConfig,
    GuardsConfig,
    LossSpikeConfig,
    NonFiniteConfig,
)
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.remarks import cautions
from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.train.guards import Guards, make_guards
from plumbline.launcher.runtime.train.guards.guard import Guard, RollBack, TrainingError
from plumbline.launcher.runtime.train.guards.non_finite import NonFinite
from plumbline.launcher.runtime.train.guards.spike import GradientSpike, LossSpike, Spike

if TYPE_CHECKING:
    from pathlib import Path

TOTAL, MOST = 30, 4


def result(norm: float = 1.0, applied: bool = True, loss: float = 2.0) -> StepResult:
    return StepResult(torch.tensor(loss), norm, applied, torch.zeros(0, 2), flagged=False, done=0.0)


@pytest.fixture
def guard() -> NonFinite:
    return NonFinite(NonFiniteConfig(max_skipped=MOST), TOTAL)


def test_a_guard_without_a_name_is_refused_before_its_state_is_saved() -> None:
    with pytest.raises(ValueError, match=r"guards\.guard\.Guard has no name"):
        Guards(Guard())


def test_a_skipped_update_is_a_warning_and_no_time_for_a_checkpoint(
    guard: NonFinite, capsys: pytest.CaptureFixture[str]
) -> None:
    trusted = []
    for step, update in enumerate((result(), result(math.inf, applied=False, loss=math.nan), result()), start=1):
        guard.after_step(step, update)
        trusted.append(guard.trusts_weights)
    assert trusted == [True, False, True]
    assert capsys.readouterr().err == "warning: step 2: gradient norm inf, update skipped\n"


def test_too_many_in_a_row_send_the_run_back(guard: NonFinite) -> None:
    for step in range(1, MOST):
        guard.after_step(step, result(math.nan, applied=False))
    guard.after_step(MOST, result())
    for step in range(1, MOST):
        guard.after_step(MOST + step, result(math.nan, applied=False))
    with pytest.raises(RollBack, match=rf"{MOST} update\(s\) in a row were skipped") as asked:
        guard.after_step(2 * MOST, result(math.nan, applied=False))
    assert (asked.value.guard, asked.value.first, asked.value.last) == ("non_finite", MOST + 1, 2 * MOST)


def test_it_goes_on_counting_where_a_run_was_stopped_amid_skipped_updates(guard: NonFinite) -> None:
    for step in range(1, MOST):
        guard.after_step(step, result(math.nan, applied=False))
    resumed = NonFinite(NonFiniteConfig(max_skipped=MOST), TOTAL)
    resumed.restore(json.loads(json.dumps(guard.state)))
    assert not resumed.trusts_weights
    with pytest.raises(RollBack) as asked:
        resumed.after_step(MOST, result(math.nan, applied=False))
    assert asked.value.first == 1


def test_the_last_update_may_not_be_skipped(guard: NonFinite) -> None:
    with pytest.raises(RollBack, match=r"1 update\(s\)") as asked:
        guard.after_step(TOTAL, result(math.inf, applied=False))
    assert (asked.value.first, asked.value.last) == (TOTAL, TOTAL)


@pytest.mark.parametrize(
    ("update", "words"),
    [(result(math.nan), "the gradient norm is nan"), (result(loss=math.inf), r"\(loss inf\), 0 update")],
)
def test_an_applied_update_that_is_not_finite_sends_the_run_back(
    guard: NonFinite, update: StepResult, words: str
) -> None:
    with pytest.raises(RollBack, match=words) as asked:
        guard.after_step(3, update)
    assert (asked.value.first, asked.value.last) == (3, 3)


def test_the_final_scores_are_looked_at(guard: NonFinite) -> None:
    guard.after_evaluation({"step": 5, "eval/email/loss": math.nan})
    guard.after_evaluation({"step": TOTAL, "eval/email/loss": 2.0, "eval/email/perplexity": math.inf})
    with pytest.raises(TrainingError, match=rf"step {TOTAL}: eval/email/ema_loss is nan: .* remove it"):
        guard.after_evaluation({"step": TOTAL, "eval/email/loss": 2.0, "eval/email/ema_loss": math.nan})


# -- spikes ------------------------------------------------------------------------------------------------------------

WINDOW, WARMUP, LENGTH = 32, 20, 3000


def series(seed: int) -> list[StepResult]:
    """Return updates as of a run: a loss that falls by a power law, gradients with a heavy tail to the right."""
    draw = random.Random(seed)
    return [
        result(
            loss=2.5 + 8.0 * (step + 1) ** -0.4 + draw.gauss(0, 0.06),
            norm=(0.3 + 5.0 * (step + 1) ** -0.7) * math.exp(draw.gauss(0, 0.2) + 0.1 * draw.expovariate(1)),
        )
        for step in range(LENGTH)
    ]


def spikes(action: str = "roll_back", quiet_steps: int = WARMUP, **changes: Any) -> list[Spike]:
    settings: dict[str, Any] = {"action": action, "window": WINDOW, **changes}
    return [
        LossSpike(LossSpikeConfig(**settings), quiet_steps),
        GradientSpike(GradientSpikeConfig(**settings), quiet_steps),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_no_spike(seed: int) -> None:
    for spike in spikes(window=GuardsConfig().loss_spike.window):
        for step, update in enumerate(series(seed), start=1):
            spike.after_step(step, update)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("number", "changed"), [(0, "loss"), (1, "norm")])
def test_a_loss_that_jumps_and_a_gradient_ten_times_the_usual_are(seed: int, number: int, changed: str) -> None:
    updates, step = series(seed), 400 + 100 * seed
    usual = updates[step - 1]
    spike, other = spikes()[number], spikes()[1 - number]
    odd = {"loss": result(usual.grad_norm, loss=usual.loss.item() + 1.5), "norm": result(10 * usual.grad_norm)}[changed]
    for before, update in enumerate(updates[: step - 1], start=1):
        spike.after_step(before, update)
        other.after_step(before, update)
    with pytest.raises(RollBack, match=r"is \S+ after a median of") as asked:
        spike.after_step(step, odd)
    assert (asked.value.guard, asked.value.first, asked.value.last) == (spike.name, step - 2, step)
    other.after_step(step, odd)


@pytest.mark.parametrize(("quiet_steps", "first"), [(0, WINDOW + 1), (50, 51)])
def test_there_is_no_alarm_before_the_window_is_full_or_in_the_warm_up(quiet_steps: int, first: int) -> None:
    for spike in spikes(quiet_steps=quiet_steps):
        for step in range(1, first):
            spike.after_step(step, result(norm=1e6, loss=90.0) if step == first - 1 else result())
        with pytest.raises(RollBack):
            spike.after_step(first, result(norm=1e6, loss=90.0))


def test_skipped_updates_say_nothing_of_what_is_usual() -> None:
    for spike in spikes(quiet_steps=0):
        for step in range(1, 2 * WINDOW):
            spike.after_step(step, result(norm=math.nan, loss=math.nan, applied=False))
            spike.after_step(step, result(norm=1e6, loss=90.0, applied=False))
        assert not spike.window


def test_a_spike_that_lasts_is_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    gradient = spikes("warn")[1]
    for step in range(1, 200):
        gradient.after_step(step, result(norm=12.0 if 100 <= step < 110 or step == 150 else 1.0))
    assert capsys.readouterr().err.splitlines() == [
        f"warning: step {step}: the gradient norm is 12 after a median of 1 (guards.gradient_spike)"
        for step in (100, 150)
    ]


def test_a_level_that_stays_becomes_usual() -> None:
    loss = spikes("warn")[0]
    for step in range(1, 200):
        loss.after_step(step, result(loss=2.0 if step < 100 else 4.0))
    assert not loss.inside
    assert 4.0 in loss.window


def test_what_a_spike_guard_remembers_comes_back() -> None:
    for before, after in zip(spikes("warn"), spikes("warn"), strict=True):
        for step, update in enumerate(series(5)[:100], start=1):
            before.after_step(step, update)
        before.after_step(101, result(norm=100.0, loss=20.0))
        after.restore(json.loads(json.dumps(before.state)))
        assert after.window == before.window
        assert after.inside


def test_a_window_that_was_shortened_keeps_the_newest() -> None:
    spike = spikes(window=8)[0]
    spike.restore({"window": [float(number) for number in range(20)], "inside": False})
    assert list(spike.window) == [float(number) for number in range(12, 20)]


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("non_finite", 7),
        ("non_finite", {"skipped": "word"}),
        ("loss_spike", {"window": 7}),
        ("gradient_spike", {"window": ["word"]}),
    ],
)
def test_what_no_guard_remembered_is_refused(tiny_config: Path, name: str, state: Any) -> None:
    config = load_config(tiny_config, [])
    guards = make_guards(config.guards, plan_run(config))
    assert name in guards.state
    guards.restore({})
    with pytest.raises(DamagedFileError, match=rf"state.json: guards.{name}: "):
        guards.restore({name: state})


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_guards_that_are_to_ignore_are_not_made(tiny_config: Path) -> None:
    config = load_config(tiny_config, ["guards.loss_spike.action=ignore"])
    made = make_guards(config.guards, plan_run(config)).state.keys()
    assert "loss_spike" not in made
    assert {"non_finite", "gradient_spike"} <= made


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["guards.loss_spike.action=roll_back", "checkpoint.interval=null"],
            r"loss_spike.action = roll_back: .* set che",
        ),
        (
            ["guards.gradient_spike.action=roll_back", "guards.max_rollbacks=0"],
            r"gradient_spike.action = roll_back with",
        ),
        (
            ["guards.loss_spike.action=roll_back", "checkpoint.interval=10", "checkpoint.keep_last=1"],
            r"guards.loss_spike.look_back = 2: .*checkpoint.keep_last = 1, .* set checkpoint.keep_last=2",
        ),
        (
            ["guards.gradient_spike={action: roll_back, look_back: 9}", "checkpoint.interval=4"],
            r"gradient_spike.look_back = 9: .* checkpoint.interval = 4.* set checkpoint.keep_last=4",
        ),
        (["guards.loss_spike.action=stop"], r"guards.loss_spike.action = 'stop': .*'ignore', 'warn' or 'roll_back'"),
        (["guards.loss_spike.window=4"], r"guards.loss_spike.window = 4: .* 8"),
        (["guards.gradient_spike.factor=1.0"], r"guards.gradient_spike.factor = 1.0: .* 1"),
        (["guards.gradient_spike.nats=1.0"], r"guards.gradient_spike.nats = 1.0: unknown key"),
        (["guards.max_rollbacks=-1"], r"guards.max_rollbacks = -1: .* 0"),
    ],
)
def test_guards_that_cannot_be_are_refused(tiny_config: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(tiny_config, overrides)


@pytest.mark.parametrize("keep", ["checkpoint.interval=9", "checkpoint.keep_last=4", "checkpoint.keep_every=100"])
def test_a_spike_may_send_back_where_a_checkpoint_before_it_stays(tiny_config: Path, keep: str) -> None:
    spike = "guards.gradient_spike={action: roll_back, look_back: 9}"
    assert load_config(tiny_config, ["checkpoint.interval=3", spike, keep]).guards.gradient_spike.look_back == 9


@pytest.mark.parametrize(
    ("saves", "caution"),
    [
        (
            "{interval: 3, keep_every: 100}",
            r"look_back = 9: before step 309 the 2 of checkpoint.keep_last may",
        ),
        (
            "{interval: null, local: {path: /tmp, interval: 5}}",
            r"the one checkpoint of checkpoint.local may",
        ),
        (
            "{interval: 1000}",
            r"checkpoint.interval = 1000, and the run has 20 steps: there is nothing to go back to; lower it",
        ),
        ("{interval: 20}", r"checkpoint.interval = 20, and the run has 20 steps: there is nothing to go back to"),
        ("{interval: 3, keep_every: 3}", None),
        ("{interval: 9}", None),
    ],
)
def test_a_spike_that_may_find_no_checkpoint_before_it_is_a_caution(
    tiny_config: Path, tmp_path: Path, saves: str, caution: str | None
) -> None:
    file = tmp_path / "saves.yaml"
    file.write_text(f"extends: {tiny_config}\ncheckpoint: {saves}\n")
    config = load_config(file, ["guards.gradient_spike={action: roll_back, look_back: 9}"])
    told = [line for line in cautions(config, plan_run(config)) if "guards.gradient_spike" in line]
    assert len(told) == (caution is not None)
    assert all(re.search(str(caution), line) for line in told)
