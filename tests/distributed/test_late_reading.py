"""What a step reports is read one step late, and in time for whatever depends on it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.make import make_engine
from plumbline.launcher.runtime.engine.step_result import StepUnderWay
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train.train import train
from plumbline.model.objectives.next_token import NextToken
from tests.conftest import Run

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from plumbline.launcher.runtime.config.schema import Config
    from plumbline.launcher.runtime.ranks.world import World
    from plumbline.model.objectives.objective import Losses

QUIET = ["train.steps=8", "train.eval_interval=null", "checkpoint.interval=null", "checkpoint.keep_last=9"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what a run does from now on: "made 3", "read 3"."""
    found: list[str] = []
    make, result = DeepSpeedEngine.train_step, StepUnderWay.result
    numbers: dict[int, int] = {}

    def made(engine: DeepSpeedEngine, micro_batches: list[Any], step: int, *rest: Any) -> StepUnderWay:
        under_way = make(engine, micro_batches, step, *rest)
        numbers[id(under_way)] = step + 1
        found.append(f"made {step + 1}")
        return under_way

    def read(under_way: StepUnderWay) -> Any:
        found.append(f"read {numbers[id(under_way)]}")
        return result.fget(under_way)  # type: ignore[attr-defined]

    monkeypatch.setattr(DeepSpeedEngine, "train_step", made)
    monkeypatch.setattr(StepUnderWay, "result", property(read))
    return found


def attempt(config: Config, world: World, stop: StopRequest | None = None) -> bool:
    return train(config, open_inputs(config, world), world, StopRequest() if stop is None else stop)


def configure(tiny_config: Path, root: Path, *overrides: str) -> Config:
    return load_config(tiny_config, [*QUIET, f"run.root={root}", *overrides])


def test_a_step_is_read_when_the_next_one_is_made(
    tiny_config: Path, tmp_path: Path, world: World, events: list[str]
) -> None:
    config = configure(tiny_config, tmp_path)
    assert attempt(config, world)
    steady = [event for step in range(2, 9) for event in (f"made {step}", f"read {step - 1}")]
    assert events == ["made 1", *steady, "read 8"]
    run = Run(config.run.folder)
    assert list(run.column("loss")) == [1, 2, 3, 4, 5, 6, 7, 8], "each line is there, once, in order"


def test_it_is_read_before_its_weights_are_scored_saved_or_observed(
    tiny_config: Path, tmp_path: Path, world: World, events: list[str]
) -> None:
    due = ["checkpoint.interval=2", "train.eval_interval=3", "metrics.diagnostics_interval=5"]
    config = configure(tiny_config, tmp_path, *due)
    assert attempt(config, world)
    early = [step for step in range(1, 8) if events.index(f"read {step}") < events.index(f"made {step + 1}")]
    assert early == [2, 3, 4, 5, 6]
    steps = [record["step"] for record in Run(config.run.folder).records]
    assert steps == sorted(steps)


@pytest.mark.parametrize("asked", [3, 8])
def test_a_stop_is_heard_within_a_step_and_what_it_saves_was_read(
    tiny_config: Path, tmp_path: Path, world: World, events: list[str], asked: int
) -> None:
    class AskedAtStep(StopRequest):
        def __bool__(self) -> bool:
            return sum(event.startswith("made") for event in events) >= asked - 1

    config = configure(tiny_config, tmp_path)
    assert not attempt(config, world, AskedAtStep())
    last = min(asked + 1, 8)
    assert events[-1] == f"read {last}"
    run = Run(config.run.folder)
    assert f"step_{last:08d}" in run.checkpoints
    events.clear()
    assert attempt(config, world), "and goes on from there"
    assert list(run.column("loss")) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_garbage_waits_for_a_pause(
    tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    automatic: list[bool] = []
    make = DeepSpeedEngine.train_step

    def made(*arguments: Any) -> StepUnderWay:
        automatic.append(gc.isenabled())
        return make(*arguments)

    monkeypatch.setattr(DeepSpeedEngine, "train_step", made)
    assert gc.isenabled()
    assert attempt(configure(tiny_config, tmp_path), world)
    assert automatic == [False] * 8
    assert gc.isenabled(), "it is as it was once training has ended"


def break_gradients(monkeypatch: pytest.MonkeyPatch, *broken: int) -> None:
    """Make the losses of some steps infinite."""
    whole = NextToken.forward

    def forward(objective: NextToken, model: Any, batch: Any, step: int) -> Losses:
        losses = whole(objective, model, batch, step)
        return losses._replace(terms=losses.terms * torch.inf) if step + 1 in broken else losses

    monkeypatch.setattr(NextToken, "forward", forward)


def test_no_checkpoint_is_of_a_step_whose_update_was_skipped(
    tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_gradients(monkeypatch, 2, 5)
    config = configure(tiny_config, tmp_path, "checkpoint.interval=2")
    assert attempt(config, world)
    run = Run(config.run.folder)
    names = [name for name in run.checkpoints if name.startswith("step_")]
    assert names == ["step_00000004", "step_00000006", "step_00000008"]
    assert list(run.column("skipped")) == [2, 5]


PRECISIONS = ("fp32", "bf16")
STAGES = [("adamw", stage, precision, "run.reproducible=null") for stage in range(4) for precision in PRECISIONS]
OFFLOADED = [
    ("adamw", stage, precision, "deepspeed.offload_optimizer=true") for stage in (1, 2, 3) for precision in PRECISIONS
]
HOSTED = [(name, 0, precision, "run.reproducible=null") for name in ("muon", "soap") for precision in PRECISIONS]
"""Where no number on the device tells the optimizer to skip."""


@pytest.mark.parametrize(
    ("optimizer", "stage", "precision", "more"),
    [*STAGES, ("adamw", 1, "bf16", "run.reproducible=any_ranks"), *OFFLOADED, *HOSTED],
)
def test_a_gradient_that_is_not_finite_changes_nothing(
    tiny_config: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    stage: int,
    precision: str,
    more: str,
) -> None:
    """Weights, their average, moments and the count of updates go on as if the step had not been."""
    overrides = [f"optimizer.name={optimizer}", f"deepspeed.zero_stage={stage}", f"deepspeed.precision={precision}"]
    overrides += [more, "train.ema_half_life_tokens=1000"]
    config = load_config(tiny_config, overrides)
    batches = TrainBatches(config.data, config.run.seed)

    def train_steps(*numbers: int) -> tuple[list[bool], list[float], list[Tensor]]:
        engine = make_engine(config, world)
        found = [engine.train_step(batches.micro_batches(step), step, 1e-3).result for step in numbers]
        states = [torch.as_tensor(value) for shard in engine.optimizer_state.values() for value in shard.values()]
        assert engine.ema is not None
        weights = engine.master_weights()
        tensors = [*weights, *(engine.ema.of(each) for each in weights), *states]
        return [each.applied for each in found], [each.grad_norm for each in found], [t.clone() for t in tensors]

    break_gradients(monkeypatch, 2)  # which is what makes step 1 from 0
    applied, norms, tensors = train_steps(0, 1, 2)
    assert applied == [True, False, True]
    assert norms[1] == float("inf") or norms[1] != norms[1]
    assert all(torch.isfinite(tensor).all() for tensor in tensors)
    for found, expected in zip(tensors, train_steps(0, 2)[2], strict=True):
        assert torch.equal(found, expected)
