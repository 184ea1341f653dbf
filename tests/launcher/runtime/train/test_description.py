"""What a run says of itself before it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.train.description import describe

if TYPE_CHECKING:
    from pathlib import Path

    from plumbline.launcher.runtime.config.schema import Config

TWO = World(0, 0, 2, torch.device("cpu"))
ALWAYS = ["run", "model", "base", "scaling", "data", "reading", "length", "batch", "schedule", "engine"]


def described(config: Config) -> list[tuple[str, str]]:
    lines = describe(config, plan_run(config), open_inputs(config, TWO), TWO)
    return [(line[:9].strip(), line[9:]) for line in lines if not line.startswith("warning")]


def test_a_plain_run_says_what_every_run_has(tiny_config: Path) -> None:
    config = load_config(tiny_config, [])
    lines = described(config)
    assert [name for name, _ in lines] == ALWAYS
    told = dict(lines)
    assert told["run"] == f"{config.run.folder}, seed 1"
    assert told["model"] == (
        f"qwen3, width 64 x depth 2, vocabulary 257: {totals(plan_run(config).rows).total:,} parameters"
    )
    assert told["data"].startswith("5,120 tokens in 20 steps: ")
    assert told["batch"] == "8 x 32 tokens = 2 rank(s) x 2 sequences x 2 accumulation steps"
    assert told["engine"] == "DeepSpeed ZeRO-1, fp32, on cpu"


@pytest.mark.parametrize(
    ("name", "cost"),
    [
        ("registers", "the blocks 2 times, the head 2 times"),
        ("multi_token", "the blocks 1 times, 3 further block(s) once, the head 4 times"),
    ],
)
def test_a_run_says_what_its_objective_costs_and_that_its_weight_is_0(tiny_config: Path, name: str, cost: str) -> None:
    told = dict(described(load_config(tiny_config, [f"objective.name={name}", "objective.weight=0"])))
    assert told["trains"] == f"{name}: horizon 4, weight 0.0, z_loss 0.0; for each token of the text it runs {cost}"


def test_what_a_run_has_beside_is_said_where_it_belongs(tiny_config: Path, tmp_path: Path) -> None:
    typed = ["train.ema_half_life_tokens=512", "data.batch_size_warmup=[{tokens: 512, global_batch_size: 4}]"]
    typed += [f"checkpoint.local={{path: {tmp_path}, interval: 5}}", "run.deterministic=true"]
    typed += ["objective.name=registers", "precision.weights=8"]
    config = load_config(tiny_config, typed)
    config = config.model_copy(update={"train": config.train.model_copy(update={"initialize_from": "stock"})})
    lines = described(config)
    assert [name for name, _ in lines] == [
        "run", "model", "weights", "rounded", "trains", "base", "scaling", "data", "reading", "length", "batch",
        "average", "warm-up", "schedule", "engine", "saves", "repeats",
    ]  # fmt: skip
    told = dict(lines)
    assert told["average"] == "moving, half-life 512 tokens = 2.0 steps"
    assert told["saves"] == f"every 10 steps to the run folder, every 5 to {tmp_path} of each rank's own node"
