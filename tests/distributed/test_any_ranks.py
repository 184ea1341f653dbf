"""Train the same run on one, two and four ranks (run.reproducible: any_ranks): no bit of numbers and weights differs.

What is killed and goes on with other ranks is in test_chaos.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pretrain
    from tests.distributed.conftest import TrainMatrix

STEPS = 6
COMMON = [
    "run.reproducible=any_ranks",
    f"train.steps={STEPS}",
    "train.eval_interval=3",
    "train.eval_batches=4",
    "data.global_batch_size=8",
    "data.micro_batch_size=1",
    "optimizer.grad_clip=0.3",
    "metrics.diagnostics_interval=null",
]
BF16 = "deepspeed.precision=bf16"
LOOKAHEAD = ["objective.name=latent_lookahead", "objective.horizon=2", "objective.anchors=4"]
SETTINGS = {
    "zero1-bf16": [BF16, "train.ema_half_life_tokens=512", "optimizer.grad_clip_norm=base"],
    "zero2-bf16-dropout": [
        BF16,
        "deepspeed.zero_stage=2",
        "model.dropout=0.1",
        "guards.replay_interval=2",  # which a healthy run does not notice
        "guards.replica_interval=1",
    ],
    "zero1-fp32-lookahead": [*LOOKAHEAD],
    "zero2-bf16-muon": [BF16, "deepspeed.zero_stage=2", "optimizer.name=muon"],
    "zero1-bf16-warmup": [
        BF16,
        "data.global_batch_size=12",
        "data.batch_size_warmup=[{tokens: 256, global_batch_size: 4}]",
    ],
    "zero0-bf16": [BF16, "deepspeed.zero_stage=0"],
    "zero0-fp32-muon": ["deepspeed.zero_stage=0", "optimizer.name=muon"],
    "zero0-fp32-soap": ["deepspeed.zero_stage=0", "optimizer.name=soap", "optimizer.precondition_frequency=2"],
    "zero0-bf16-soap": [BF16, "deepspeed.zero_stage=0", "optimizer.name=soap", "optimizer.precondition_frequency=2"],
    "zero1-bf16-compiled": [BF16, "train.compile=true"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_number_of_ranks_changes_no_bit(train_matrix: TrainMatrix, tiny_config: Path, name: str) -> None:
    runs = []
    for ranks in (1, 2, 4):
        settings = {f"{name}-on-{ranks}": [*COMMON, *SETTINGS[name]]}
        runs.append(train_matrix(tiny_config, settings, ranks=ranks)(next(iter(settings))))
    one, *others = runs
    assert {line["step"] for line in one.numbers} == set(range(1, STEPS + 1))
    for other in others:
        assert other.numbers == one.numbers
        for tensor, weight in one.weights(STEPS).items():
            assert torch.equal(other.weights(STEPS)[tensor], weight), tensor


def test_stages_one_and_two_have_the_same_bits(train_matrix: TrainMatrix, tiny_config: Path) -> None:
    settings = {f"same-zero{stage}": [*COMMON, BF16, f"deepspeed.zero_stage={stage}"] for stage in (1, 2)}
    runs = [train_matrix(tiny_config, settings, ranks=2)(name) for name in settings]
    assert runs[0].numbers == runs[1].numbers


def test_it_is_the_gradient_of_an_ordinary_run(train_matrix: TrainMatrix, tiny_config: Path) -> None:
    common = [*COMMON, "optimizer.grad_clip_norm=base"]
    settings = {"reproducible": common, "ordinary": [*common, "run.reproducible=null"]}
    train = train_matrix(tiny_config, settings, ranks=2)
    found, expected = train("reproducible"), train("ordinary")
    assert found.column("loss") == pytest.approx(expected.column("loss"), rel=1e-6)
    assert found.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-5)
    for tensor, weight in expected.weights(STEPS).items():
        torch.testing.assert_close(found.weights(STEPS)[tensor], weight, rtol=0, atol=3e-5, msg=tensor)


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["data.micro_batch_size=2"], 3, "3 ranks cannot share micro-batches of 2 sequences .* use 1 or 2 or 4 ranks"),
        (["data.micro_batch_size=3"], 1, "data.micro_batch_size = 3 does not divide the 8 sequences of a step"),
        (["deepspeed.zero_stage=3"], 1, "deepspeed.zero_stage = 3 holds no whole gradient"),
        (["deepspeed.offload_optimizer=true"], 1, "deepspeed.offload_optimizer = true is not served"),
    ],
)
def test_what_cannot_have_the_same_bits_is_refused_at_the_start(
    run_pretrain: Pretrain, tiny_config: Path, overrides: list[str], ranks: int, message: str
) -> None:
    outcome = run_pretrain(tiny_config, "refused", [*COMMON, *overrides], ranks=ranks)
    assert outcome.code == 2
    assert re.search(message, outcome.stderr), outcome.stderr
