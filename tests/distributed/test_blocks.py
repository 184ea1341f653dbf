"""Unusual blocks on real ranks: learned scalars, frozen and drawn tensors, a loss with a side term, at every stage.

Four steps on two ranks for each setting; what the stages compute must agree, and what does not train must not move.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.models.open import load_model
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.sampling import GREEDY

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Run
    from tests.distributed.conftest import TrainMatrix

MODELS = {
    "gains": [
        "model.block=norm_free",
        "model.branch_gain=scalar",
        "model.mlp=xielu",
        "model.mlp_input_scale=1.0",
        "model.norm=single_scale_rmsnorm",
        "model.embedding_projection=true",
        "model.attention_sink=true",
        "model.attention_gate=head",
        "model.value_residual=true",
    ],
    "frozen": ["model.frozen_qk=true", "model.frozen_mlp=true", "model.qk_norm_frozen=true", "model.block=post_norm"],
    "mixing": ["model.family=mixit", "model.branch_gain=vector"],
    "pruned": ["model.attention=pruned", "objective.pruning_weight=0.2", "objective.pruning_steps=4"],
    "sas": ["model.family=sas", "model.num_key_value_heads=null"],
}
STAGES = ["fp32_0", "fp32_1", "fp32_3", "bf16_3"]
SHORT = ["train.steps=4", "train.eval_interval=null", "checkpoint.interval=4", "train.sample_prompts=[]"]
SHORT += ["train.eval_batches=1", "metrics.diagnostics_interval=null"]
ONE_MICRO_BATCH = ["data.global_batch_size=4"]  # for each rank and step; two where a side term is to be summed


def typed(model: str, stage: str) -> list[str]:
    precision, number = stage.split("_")
    batch = [] if model == "pruned" else ONE_MICRO_BATCH
    return [*SHORT, *batch, *MODELS[model], f"deepspeed.precision={precision}", f"deepspeed.zero_stage={number}"]


@pytest.fixture(scope="module")
def runs(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str, str], Run]:
    """Return the finished runs of all models at all stages."""
    settings = {f"{model}_{stage}": typed(model, stage) for model in MODELS for stage in STAGES}
    found = train_matrix(tiny_config, settings)
    return lambda model, stage: found(f"{model}_{stage}")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", ["fp32_1", "fp32_3"])
def test_stages_agree(runs: Callable[[str, str], Run], model: str, stage: str) -> None:
    one, other = runs(model, "fp32_0"), runs(model, stage)
    assert other.column("loss") == pytest.approx(one.column("loss"), rel=1e-6)
    assert other.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=2e-5)
    assert other.column("loss")[4] < other.column("loss")[1]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_what_trains_moves_and_the_rest_is_what_was_drawn(
    runs: Callable[[str, str], Run], tiny_config: Path, model: str, stage: str
) -> None:
    config = load_config(tiny_config, typed(model, stage))
    rows = plan_run(config).rows
    fresh = CausalLM(config.model, multipliers(config.model, config.parameterization))
    initialize(fresh, rows, config.run.seed)
    drawn, found = dict(fresh.named_parameters()), runs(model, stage).weights(4)
    assert found.keys() == drawn.keys()
    for row in rows:
        started = drawn[row.name].detach()
        if not row.trainable:
            # In bf16 a tensor without an optimizer has no fp32 copy: it is what the forward passes use
            started = started.bfloat16().float() if stage.startswith("bf16") else started
        assert torch.equal(found[row.name], started) is not row.trainable, row.name


@pytest.mark.parametrize("model", MODELS)
def test_a_finished_run_opens_again_and_continues_text(runs: Callable[[str, str], Run], model: str) -> None:
    opened = load_model(runs(model, "fp32_3").folder, torch.device("cpu"))
    tokens = list(opened.continuation([1, 2, 3], 8, sampling=GREEDY))
    sequence = torch.tensor([[1, 2, 3, *tokens]])
    assert tokens == opened.module(sequence)[0, 2:-1].argmax(-1).tolist(), "with a cache as without"
