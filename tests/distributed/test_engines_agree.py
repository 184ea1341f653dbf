"""The training loop on the plain engine and on DeepSpeed: whoever implements the interface, the run is the same.

One rank, with everything that asks an engine for something: evaluation, the moving average, diagnostics, checkpoints.
"""

from __future__ import annotations

import shutil
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.checkpoint import resume
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.plain import PlainEngine
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.folder import prepare_run_folder
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train.garbage import collect_engine
from plumbline.launcher.runtime.train.guards.guard import TrainingError
from plumbline.launcher.runtime.train.train import train as train_run
from plumbline.model.attention.pruned import PrunedAttention
from tests.conftest import Run
from tests.distributed.trainers import MakeEngine, make_trainer

if TYPE_CHECKING:
    from pathlib import Path

EVERYTHING = [
    "model.dropout=0.1",
    "train.steps=4",
    "train.eval_interval=2",
    "train.ema_half_life_tokens=600",
    "checkpoint.interval=2",
    "checkpoint.keep_last=9",
    "metrics.diagnostics_interval=2",
]
GRADIENTS = "grad/"  # stage 0 shows them clipped already, which changes last bits


def train(engine: MakeEngine, name: str, overrides: list[str], tiny_config: Path, world: World) -> Run:
    """Train from the start, or on from the newest checkpoint of the run."""
    root = tiny_config.parent / "engines"
    config = load_config(tiny_config, [*EVERYTHING, f"run.root={root}", f"run.name={name}", *overrides])
    inputs = open_inputs(config, world)
    found = resume.find(config.run.folder / "checkpoints", world)
    prepare_run_folder(config, inputs, world)
    trainer = make_trainer(config, inputs, world, engine)
    if found is not None:
        trainer.resume(found)
    assert trainer.run()
    trainer.close()
    return Run(config.run.folder)


@pytest.fixture(scope="module")
def plain(tiny_config: Path, world: World) -> Run:
    return train(PlainEngine, "plain", [], tiny_config, world)


def test_there_is_something_to_compare(plain: Run) -> None:
    keys = {key for record in plain.numbers for key in record}
    assert {"loss", "grad_norm", "eval/email/loss", "eval/email/ema_loss", "eval/email/w8a8_delta"} <= keys
    assert any(key.startswith("grad/") for key in keys)
    assert any(key.startswith("update/") for key in keys)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_run_is_that_of_the_plain_engine(plain: Run, tiny_config: Path, world: World, stage: int) -> None:
    """At stage 0 to the last bit. The others update flat shards; 2 keeps them as 1 does."""
    run = train(DeepSpeedEngine, f"zero_{stage}", [f"deepspeed.zero_stage={stage}"], tiny_config, world)
    assert len(run.numbers) == len(plain.numbers)
    for found, expected in zip(run.numbers, plain.numbers, strict=True):
        assert found.keys() == expected.keys()
        if stage:
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        else:
            assert found == pytest.approx(expected, rel=1e-5)
            assert not [key for key in found if found[key] != expected[key] and not key.startswith(GRADIENTS)]
    for name, weight in plain.weights(4).items():
        rtol, atol = (1e-5, 1e-6) if stage else (0.0, 0.0)
        torch.testing.assert_close(run.weights(4)[name], weight, rtol=rtol, atol=atol, msg=name)


def test_a_resumed_run_of_the_plain_engine_is_the_same(plain: Run, tiny_config: Path, world: World) -> None:
    half = plain.folder.with_name("half")
    shutil.copytree(plain.folder, half)
    shutil.rmtree(half / "checkpoints" / "step_00000004")
    resumed = train(PlainEngine, "half", [], tiny_config, world)
    assert resumed.numbers == plain.numbers
    assert all(torch.equal(weight, resumed.weights(4)[name]) for name, weight in plain.weights(4).items())


def test_the_objective_hears_of_every_step(tiny_config: Path, world: World) -> None:
    """As pruning does, whose votes sharpen over the steps."""
    pruned = ["model.attention=pruned", "objective.pruning_weight=0.2", "objective.pruning_steps=4"]
    config = load_config(tiny_config, pruned)
    engine, alphas = PlainEngine(config, world), []
    for step in (0, 3, 4):
        engine.train_step(TrainBatches(config.data, config.run.seed).micro_batches(step), step, 1e-3)
        (alpha,) = {m.alpha.item() for m in engine.model.modules() if isinstance(m, PrunedAttention)}
        alphas.append(alpha)
    assert alphas == [1.0, pytest.approx(4.5 + 3.5 * 0.5**0.5), 8.0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_closed_engine_leaves_memory(tiny_config: Path, world: World, stage: int) -> None:
    """A worker of a sweep makes one engine after another."""
    config = load_config(tiny_config, [f"deepspeed.zero_stage={stage}", "deepspeed.precision=bf16"])
    engine = DeepSpeedEngine(config, world)
    engine.train_step(open_inputs(config, world).train.micro_batches(0), 0, 1e-3)
    held = [weakref.ref(weight) for weight in (*engine.master_weights(), *engine.model.parameters())]
    engine.close()
    del engine
    collect_engine()
    assert not [reference for reference in held if reference() is not None]


@pytest.mark.parametrize("lr", [0.004, 1e38])
def test_training_closes_its_engine_whether_it_ends_or_breaks_down(
    tiny_config: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lr: float
) -> None:
    closed: list[DeepSpeedEngine] = []
    monkeypatch.setattr(DeepSpeedEngine, "close", lambda engine: closed.append(engine))
    config = load_config(tiny_config, [f"optimizer.lr={lr}", "train.steps=6", f"run.root={tmp_path}"])
    with nullcontext() if lr < 1 else pytest.raises(TrainingError):
        assert train_run(config, open_inputs(config, world), world, StopRequest())
    assert len(closed) == 1
