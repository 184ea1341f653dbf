"""Go on with other ranks: another number, another ZeRO stage, another micro-batch, offloaded or not.

A checkpoint holds tensors by name and range, so what one layout wrote another reads to the last bit. Training then sums
in another order: in fp32 its losses stay within rounding of those of a run that kept its ranks.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from plumbline.launcher.runtime.checkpoint import resume
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.checkpoint.tensors import collect
from plumbline.launcher.runtime.checkpoint.weights import TensorFile
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.plain import PlainEngine
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs
from tests.distributed.conftest import save, state_after

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conftest import Pretrain, Run

STEPS, HALF = 8, 4
LAYOUTS = {
    "plain": [],
    "stage_0": ["deepspeed.zero_stage=0"],
    "stage_1": ["deepspeed.zero_stage=1"],
    "stage_2": ["deepspeed.zero_stage=2"],
    "stage_2_offload": ["deepspeed.zero_stage=2", "deepspeed.offload_optimizer=true"],
    "stage_3": ["deepspeed.zero_stage=3"],
    "stage_3_offload": ["deepspeed.zero_stage=3", "deepspeed.offload_optimizer=true"],
}
MODELS = {
    "adamw": ["train.ema_half_life_tokens=512"],
    "bf16": ["deepspeed.precision=bf16", "train.ema_half_life_tokens=512"],
    "muon": ["optimizer.name=muon"],
    "frozen": ["model.frozen_qk=true", "model.frozen_mlp=true", "model.qk_norm_frozen=true", "model.block=post_norm"],
}


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, [])


def make(config: Config, world: World, layout: str) -> Engine:
    return PlainEngine(config, world) if layout == "plain" else DeepSpeedEngine(config, world)


def moved(
    tiny_config: Path, world: World, inputs: Inputs, tmp_path: Path, model: str, layouts: Sequence[str]
) -> tuple[list[TensorFile], list[Engine]]:
    """Train two steps on the first layout, hand the checkpoint on from each to the next; return what each one saved."""
    files: list[TensorFile] = []
    engines: list[Engine] = []
    folders: list[Path] = []
    for layout in layouts:
        config = load_config(tiny_config, [*MODELS[model], *LAYOUTS[layout]])
        engine = make(config, world, layout)
        if not engines:
            for step in range(2):
                engine.train_step(inputs.train.micro_batches(step), step, 1e-3)
        else:
            assert resume.load(engine, folders[-1]) == state_after(2, inputs)
        files.append(collect(engine)[0])
        folders.append(save(engine, config, state_after(2, inputs), tmp_path / str(len(files)), world))
        engines.append(engine)
    return files, engines


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("adamw", ["plain", "stage_1", "stage_3", "stage_2_offload", "stage_0", "plain"]),
        ("bf16", ["stage_1", "stage_3", "stage_2", "stage_3_offload", "stage_1"]),
        ("muon", ["stage_1", "stage_3", "stage_2", "stage_1"]),
        ("frozen", ["stage_1", "stage_3", "stage_0", "stage_1"]),
    ],
)
def test_every_bit_of_the_state_moves_between_stages(
    tiny_config: Path, world: World, inputs: Inputs, tmp_path: Path, model: str, layouts: list[str]
) -> None:
    (first, *others), engines = moved(tiny_config, world, inputs, tmp_path, model, layouts)
    assert {"weight", "step"} <= {key.partition("/")[0] for key in first.tensors}
    for layout, other in zip(layouts[1:], others, strict=True):
        assert other.metadata == first.metadata, layout
        assert other.tensors.keys() == first.tensors.keys(), layout
        different = [key for key, tensor in first.tensors.items() if not torch.equal(tensor, other.tensors[key])]
        assert different == [], layout
    ends = engines[0], engines[-1]
    results = [engine.train_step(inputs.train.micro_batches(2), 2, 1e-3).result for engine in ends]
    if layouts[0] == layouts[-1]:
        assert torch.equal(results[0].loss, results[1].loss)
        assert results[0].grad_norm == results[1].grad_norm


def test_tensors_of_another_model_are_refused(tiny_config: Path, world: World, inputs: Inputs, tmp_path: Path) -> None:
    config = load_config(tiny_config, [])
    folder = save(PlainEngine(config, world), config, state_after(1, inputs), tmp_path, world)
    other = PlainEngine(load_config(tiny_config, ["model.intermediate_size=128"]), world)
    with pytest.raises(CheckpointError, match=r"holds other tensors than this model has: .*mlp"):
        resume.load(other, folder)


@pytest.fixture(scope="module")
def whole(run_pretrain: Pretrain, tiny_config: Path) -> Callable[[str, str, int], Run]:
    """Train a model on some ranks at a stage, uninterrupted, when it is first asked for."""

    @functools.cache
    def run(model: str, layout: str, ranks: int) -> Run:
        overrides = [*common(), *MODELS[model], *LAYOUTS[layout]]
        outcome = run_pretrain(tiny_config, f"{model}_{layout}_{ranks}", overrides, ranks=ranks)
        assert outcome.code == 0, outcome.stderr
        return outcome.run

    return run


def common() -> list[str]:
    return [
        f"train.steps={STEPS}",
        "train.eval_interval=null",
        f"checkpoint.interval={HALF}",
        "checkpoint.keep_last=9",
        "data.global_batch_size=8",
        "data.micro_batch_size=1",
        "train.eval_batches=4",
    ]


@pytest.mark.parametrize(
    ("model", "before", "ranks", "after", "then"),
    [
        ("adamw", "stage_1", 2, "stage_3", 1),
        ("adamw", "stage_3", 2, "stage_2_offload", 4),
        ("adamw", "stage_1", 1, "stage_0", 2),
        ("muon", "stage_1", 2, "stage_1", 1),
        ("muon", "stage_1", 2, "stage_3", 4),
        ("bf16", "stage_1", 2, "stage_2", 1),
    ],
)
def test_another_number_of_ranks_goes_on_with_the_same_losses(
    whole: Callable[[str, str, int], Run],
    run_pretrain: Pretrain,
    tiny_config: Path,
    model: str,
    before: str,
    ranks: int,
    after: str,
    then: int,
) -> None:
    expected = whole(model, before, ranks)
    name = f"{model}_{before}_{ranks}_{after}_{then}"
    half = expected.folder.with_name(name)
    shutil.copytree(expected.folder, half)
    shutil.rmtree(half / "checkpoints" / f"step_{STEPS:08d}")
    (half / "result.json").unlink()
    overrides = [
        *common(),
        *MODELS[model],
        *LAYOUTS[after],
        "data.micro_batch_size=2",
        "train.eval_batches=2",
        f"run.root={half.parent}",
    ]
    outcome = run_pretrain(tiny_config, name, overrides, ranks=then)
    assert outcome.code == 0, outcome.stderr
    assert f"resuming after step {HALF}" in outcome.stdout
    stages = [LAYOUTS[layout][0][-1] for layout in (before, after)]
    assert (
        f"written by {ranks} rank(s) at ZeRO stage {stages[0]}, read by {then} rank(s) at ZeRO stage {stages[1]}"
        in outcome.stdout
    )
    tolerance = {"adamw": 2e-6, "muon": 2e-3, "bf16": 2e-3}[model]
    for key in ("loss", "eval/email/loss"):
        found, wanted = outcome.run.column(key), expected.column(key)
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=tolerance), key
    if model == "adamw":
        for tensor, weight in expected.weights(STEPS).items():
            torch.testing.assert_close(outcome.run.weights(STEPS)[tensor], weight, rtol=0, atol=3e-5, msg=tensor)
