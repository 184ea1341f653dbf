"""The moving average on real ranks: what it is under every ZeRO stage, that it disturbs nothing, what a resume keeps.

Every step of each run is saved, so the average can be formed again from the weights themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plumbline.launcher.runtime.checkpoint import resume
from plumbline.launcher.runtime.checkpoint.saved_tensors import SavedTensors
from plumbline.launcher.runtime.checkpoint.tensors import AVERAGE, WEIGHT, read_model
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.run.inputs import Inputs, open_inputs
from plumbline.launcher.runtime.scoring.scores import held_out_loss
from plumbline.model.objectives.next_token import NextToken
from plumbline.model.objectives.objective import Losses
from tests.distributed.conftest import save, state_after, whole_weights
from tests.distributed.trainers import make_trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plumbline.launcher.runtime.ranks.world import World
    from tests.conftest import Run
    from tests.distributed.conftest import TrainMatrix

STEPS, STEP_TOKENS, HALF_LIFE = 4, 256, 1000
SHORT = [f"train.steps={STEPS}", "train.eval_interval=2"]
AVERAGED = [*SHORT, f"train.ema_half_life_tokens={HALF_LIFE}", "checkpoint.interval=1", f"checkpoint.keep_last={STEPS}"]
BF16, OFFLOAD = "deepspeed.precision=bf16", "deepspeed.offload_optimizer=true"
STAGES = {
    **{f"fp32_{stage}": [f"deepspeed.zero_stage={stage}"] for stage in range(4)},
    **{f"bf16_{stage}": [f"deepspeed.zero_stage={stage}", BF16] for stage in (1, 3)},
    "offload_2": ["deepspeed.zero_stage=2", BF16, OFFLOAD],
}
ALONE = ("fp32_3", "bf16_1", "bf16_3")


@pytest.fixture(scope="module")
def runs(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str], Run]:
    """Return the finished runs by two ranks: each stage with the average, and some without (NAME_off)."""
    settings = {f"ema_{name}": [*overrides, *AVERAGED] for name, overrides in STAGES.items()}
    settings |= {f"ema_{name}_off": [*STAGES[name], *SHORT] for name in ALONE}
    found = train_matrix(tiny_config, settings)
    return lambda name: found(f"ema_{name}")


def saved(run: Run, kind: str, step: int) -> dict[str, Tensor]:
    return read_model(run.folder / "checkpoints" / f"step_{step:08d}", kind)


def plain_average(run: Run, steps: int) -> dict[str, Tensor]:
    """Return weights averaged by definition: 2^(-age / half-life), age in tokens, over the states after each step."""
    shares = [2.0 ** (-(steps - step) * STEP_TOKENS / HALF_LIFE) for step in range(1, steps + 1)]
    states = [saved(run, WEIGHT, step) for step in range(1, steps + 1)]
    return {
        name: sum((share * state[name].double() for share, state in zip(shares, states, strict=True)), torch.zeros(()))
        / sum(shares)
        for name in states[0]
    }


@pytest.mark.parametrize("name", list(STAGES))
def test_the_average_is_that_of_the_weights(runs: Callable[[str], Run], name: str) -> None:
    run = runs(name)
    assert all(
        torch.equal(saved(run, AVERAGE, 1)[tensor], weight) for tensor, weight in saved(run, WEIGHT, 1).items()
    ), "after one update there is nothing else to average"
    for steps in range(2, STEPS + 1):
        found, expected = saved(run, AVERAGE, steps), plain_average(run, steps)
        assert found.keys() == expected.keys()
        for tensor, average in expected.items():
            torch.testing.assert_close(found[tensor].double(), average, rtol=1e-6, atol=1e-8, msg=f"{name}: {tensor}")


@pytest.mark.parametrize("name", list(STAGES))
def test_the_held_out_loss_is_that_of_the_average(
    runs: Callable[[str], Run], tiny_config: Path, world: World, name: str
) -> None:
    run, inputs = runs(name), open_inputs(load_config(tiny_config, []), world)
    split, batches = inputs.validation["email"]
    losses = run.column("eval/email/ema_loss")
    assert list(losses) == [2, 4]
    assert json.loads((run.folder / "result.json").read_text())["eval/email/ema_loss"] == losses[4]
    dtype, tolerance = (torch.float32, 1e-6) if name.startswith("fp32") else (torch.bfloat16, 2e-4)
    model = load_model(run.folder / "checkpoints" / "step_00000004", torch.device("cpu"), dtype, average="ema")
    scores = held_out_loss(model, batches, split)
    assert losses[4] == pytest.approx(scores.loss, rel=tolerance)
    assert losses[4] != pytest.approx(run.column("eval/email/loss")[4], rel=20 * tolerance), "the weights' own"


@pytest.mark.parametrize("name", ALONE)
def test_it_changes_nothing_in_training(runs: Callable[[str], Run], name: str) -> None:
    with_it, without = runs(name), runs(f"{name}_off")
    for key in ("loss", "grad_norm", "eval/email/loss"):
        assert with_it.column(key) == without.column(key), key
    assert without.column("eval/email/ema_loss") == {}
    with SavedTensors(without.folder / "checkpoints" / f"step_{STEPS:08d}") as tensors:
        assert tensors.average is None
        assert all(AVERAGE not in kinds for kinds in tensors.kinds.values())


@pytest.mark.parametrize("name", list(STAGES))
def test_every_rank_keeps_its_own_shard(runs: Callable[[str], Run], name: str) -> None:
    """Half of the parameters each, but for padding; at stage 0, where every rank has everything, half is written."""
    count = sum(weight.numel() for weight in saved(runs(name), WEIGHT, 1).values())
    folder = runs(name).folder / "checkpoints" / f"step_{STEPS:08d}"
    shards = sorted((folder / "state").iterdir())
    assert [shard.name for shard in shards] == ["rank_00000.safetensors", "rank_00001.safetensors"]
    for kind in (WEIGHT, AVERAGE, "exp_avg"):
        sizes = [
            sum(tensor.numel() for key, tensor in load_file(shard).items() if key.startswith(f"{kind}/"))
            for shard in shards
        ]
        assert sum(sizes) == count
        assert sizes == pytest.approx([count / 2, count / 2], rel=0.01)


@pytest.fixture(scope="module")
def config(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return load_config(tiny_config, [BF16, *AVERAGED, f"run.root={tmp_path_factory.mktemp('averaged')}"])


def average_of(engine: Engine) -> dict[str, Tensor]:
    assert engine.ema is not None
    with engine.ema.in_place():
        return whole_weights(engine)


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return whole_weights(engine)


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_skipped_update_does_not_enter(
    config: Config, inputs: Inputs, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the first: the average is then still to begin."""
    engine = DeepSpeedEngine(config, world)
    assert engine.ema is not None
    initial = weights_of(engine)
    assert equal(average_of(engine), initial)

    whole = NextToken.forward

    def broken(*arguments: Any) -> Losses:
        losses = whole(*arguments)
        return losses._replace(terms=losses.terms * torch.nan)

    for step, update in enumerate((broken, whole, broken, whole)):
        monkeypatch.setattr(NextToken, "forward", update)
        before = average_of(engine)
        assert engine.train_step(inputs.train.micro_batches(step), step, 1e-3).result.applied == (update is whole)
        assert equal(average_of(engine), before) == (update is broken)
        if step == 1:
            assert equal(average_of(engine), weights_of(engine)), "the first that was applied is all there is"
    assert engine.ema.tokens == 2 * STEP_TOKENS


@pytest.fixture(scope="module")
def folder(config: Config, inputs: Inputs, world: World) -> Path:
    """Return a checkpoint after three steps."""
    trainer = make_trainer(config, inputs, world)
    for step in range(3):
        trainer._advance(trainer.engine.train_step(inputs.train.micro_batches(step), step, 1e-3), 1e-3)
    trainer.saver.save(trainer.state)
    return config.run.folder / "checkpoints" / "step_00000003"


@pytest.mark.parametrize("half_life", [HALF_LIFE, 2 * HALF_LIFE, None], ids=["same", "other", "off"])
def test_only_an_average_of_the_same_half_life_goes_on(
    folder: Path,
    config: Config,
    inputs: Inputs,
    world: World,
    tiny_config: Path,
    capsys: pytest.CaptureFixture[str],
    half_life: int | None,
) -> None:
    value = "null" if half_life is None else half_life
    new = load_config(tiny_config, [BF16, *AVERAGED, f"train.ema_half_life_tokens={value}"])
    resume.check_resume(config, new, inputs.fingerprints, folder)
    trainer = make_trainer(new, inputs, world)
    capsys.readouterr()
    trainer.resume(folder)
    told = "the moving average starts here" in capsys.readouterr().out
    assert equal(weights_of(trainer.engine), read_model(folder))
    if half_life is None:
        assert (trainer.engine.ema, told) == (None, False)
        return
    assert trainer.engine.ema is not None
    if half_life == HALF_LIFE:
        assert (trainer.engine.ema.tokens, told) == (3 * STEP_TOKENS, False)
        assert equal(average_of(trainer.engine), read_model(folder, AVERAGE))
    else:
        assert (trainer.engine.ema.tokens, told) == (0, True)
        assert equal(average_of(trainer.engine), weights_of(trainer.engine)), "of the checkpoint, not initial ones"


def test_it_can_be_switched_on_in_the_middle(
    config: Config, tiny_config: Path, inputs: Inputs, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = load_config(tiny_config, [BF16, *SHORT])
    engine = DeepSpeedEngine(without, world)
    engine.train_step(inputs.train.micro_batches(2), 2, 1e-3)
    folder = save(engine, without, state_after(3, inputs), tmp_path, world)
    trainer = make_trainer(config, inputs, world)
    trainer.resume(folder)
    assert "the moving average starts here" in capsys.readouterr().out
    trainer.engine.train_step(inputs.train.micro_batches(3), 3, 1e-3)
    assert equal(average_of(trainer.engine), weights_of(trainer.engine))
    assert not equal(weights_of(trainer.engine), read_model(folder))
