"""Training with a growing batch: what the plain engine makes of the same samples, whole or resumed across a switch.

Two ranks, micro-batches of 2: four steps of 4 sequences, two of 8, then 16, so 1, 2 and 4 accumulation steps.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.checkpoint.resume import check_resume
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.plain import PlainEngine
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import open_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Pretrain, Run
    from tests.distributed.conftest import TrainMatrix

SIZES = [4, 4, 4, 4, 8, 8, 16, 16, 16, 16]
FACTORS = [0.5 * math.sqrt(4 / 16), *(math.sqrt(size / 16) for size in SIZES[1:])]
GROWING = [
    "data.global_batch_size=16",
    "data.batch_size_warmup=[{tokens: 300, global_batch_size: 4}, {tokens: 400, global_batch_size: 8}]",
    "schedule.name=constant",
    "schedule.lr_scaling=sqrt",
    f"train.steps={len(SIZES)}",
]
SAVED = ["checkpoint.interval=3", "checkpoint.keep_last=9"]
EXACT = {
    **{f"growing_{stage}": [*GROWING, f"deepspeed.zero_stage={stage}"] for stage in range(4)},
    "growing_offload": [*GROWING, "deepspeed.zero_stage=2", "deepspeed.offload_optimizer=true"],
}
RESUMED = {"growing_bf16": [*GROWING, *SAVED, "deepspeed.precision=bf16", "model.dropout=0.1"]}


@pytest.fixture(scope="module")
def runs(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str], Run]:
    """Train all settings, by two ranks."""
    return train_matrix(tiny_config, EXACT | RESUMED)


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, GROWING)


@pytest.fixture(scope="module")
def plain_losses(config: Config, world: World) -> list[float]:
    """Train with the plain engine on batches and at rates that are counted out by hand, a sequence at a time."""
    one_by_one = config.data.model_copy(update={"global_batch_size": 1, "micro_batch_size": 1, "batch_size_warmup": []})
    samples, engine = TrainBatches(one_by_one, config.run.seed), PlainEngine(config, world)
    losses, consumed = [], 0
    for step, (size, factor) in enumerate(zip(SIZES, FACTORS, strict=True)):
        batch = [samples.micro_batches(number)[0] for number in range(consumed, consumed + size)]
        consumed += size
        losses.append(engine.train_step(batch, step, 4e-3 * factor).result.loss.item())
    return losses


@pytest.mark.parametrize("name", list(EXACT))
def test_every_stage_equals_the_plain_engine(runs: Callable[[str], Run], plain_losses: list[float], name: str) -> None:
    run = runs(name)
    assert list(run.column("loss").values()) == pytest.approx(plain_losses, rel=1e-6)
    lines = [record for record in run.records if "loss" in record]
    assert [line["tokens"] for line in lines] == [32 * sum(SIZES[: step + 1]) for step in range(len(SIZES))]
    assert [line["lr"] for line in lines] == [4e-3 * factor for factor in FACTORS]


def test_resumed_across_the_switches_equals_uninterrupted(
    runs: Callable[[str], Run], run_pretrain: Pretrain, tiny_config: Path
) -> None:
    """As a kill after the first checkpoint leaves it: 3 steps in, with 1 micro-batch to go before a switch to 2."""
    whole = runs("growing_bf16")
    killed = whole.folder.with_name("growing_killed")
    shutil.copytree(whole.folder, killed)
    for step in (6, 9, 10):
        shutil.rmtree(killed / "checkpoints" / f"step_{step:08d}")
    (killed / "result.json").unlink()
    state = json.loads((killed / "checkpoints" / "step_00000003" / "state.json").read_text())
    assert (state["samples"], state["tokens"]) == (12, 12 * 32)

    outcome = run_pretrain(tiny_config, killed.name, RESUMED["growing_bf16"], ranks=2)
    assert outcome.code == 0, outcome.stderr
    assert "resuming after step 3 from" in outcome.stdout
    assert "warm-up  batch of 4 to step 4, 8 to step 6, 16 sequences; learning rate scaling sqrt" in outcome.stdout
    assert outcome.run.numbers == whole.numbers


def test_another_warm_up_is_another_run(runs: Callable[[str], Run], config: Config, tiny_config: Path) -> None:
    other = load_config(tiny_config, [*GROWING, "data.batch_size_warmup=[{tokens: 300, global_batch_size: 8}]"])
    world, folder = World(0, 0, 2, torch.device("cpu")), runs("growing_bf16").folder / "checkpoints" / "step_00000003"
    fingerprints = open_inputs(config, world).fingerprints
    check_resume(config, config, fingerprints, folder)
    with pytest.raises(CheckpointError, match=r"data\.batch_size_warmup: \[\{'tokens': 300, 'global_batch_size': 4"):
        check_resume(config, other, fingerprints, folder)
