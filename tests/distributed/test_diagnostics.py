"""Diagnostics on real ranks: the same for every ZeRO stage and world size, and training does not notice them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Run
    from tests.distributed.conftest import TrainMatrix

STEPS, INTERVAL = 4, 2
SHORT = [f"train.steps={STEPS}", "train.eval_interval=2", "checkpoint.interval=null"]
OFF = [*SHORT, "metrics.diagnostics_interval=null"]
# The cap holds all of a micro-batch of either world size, and every fourth query is looked at
ON = [*SHORT, f"metrics.diagnostics_interval={INTERVAL}", "metrics.diagnostics_tokens=4096"]
BF16 = "deepspeed.precision=bf16"
FP32 = {f"fp32_{stage}": [f"deepspeed.zero_stage={stage}"] for stage in range(4)}
REST = {
    **{f"bf16_{stage}": [f"deepspeed.zero_stage={stage}", BF16] for stage in range(4)},
    "offload_2": ["deepspeed.zero_stage=2", "deepspeed.offload_optimizer=true"],
    "dropout": [BF16, "model.dropout=0.1"],
    "still": ["optimizer.lr=1e-12"],
    "still_dropout": ["optimizer.lr=1e-12", "model.dropout=0.5"],
    # One number each: at stage 3 one of two ranks holds nothing but padding
    **{f"gains_{stage}": [f"deepspeed.zero_stage={stage}", "model.branch_gain=scalar"] for stage in (0, 3)},
}
STAGES = FP32 | REST
ALONE = ("fp32_3", "dropout")
# One rank sees in its first micro-batch what two ranks see in theirs
WHOLE_BATCH = ["data.micro_batch_size=8", "deepspeed.zero_stage=1"]
HALF_BATCH = ["data.micro_batch_size=4", "deepspeed.zero_stage=1"]


@pytest.fixture(scope="module")
def runs(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str], Run]:
    """Return the finished runs by two ranks, observed and (NAME_off) not, and one by a single rank."""
    settings = {f"seen_{name}": [*overrides, *ON] for name, overrides in STAGES.items()}
    settings |= {f"seen_{name}_off": [*STAGES[name], *OFF] for name in ALONE}
    settings |= {"seen_half": [*HALF_BATCH, *ON, "checkpoint.interval=1", f"checkpoint.keep_last={STEPS}"]}
    by_two = train_matrix(tiny_config, settings)
    by_one = train_matrix(tiny_config, {"seen_whole": [*WHOLE_BATCH, *ON]}, ranks=1)
    return lambda name: (by_one if name == "whole" else by_two)(f"seen_{name}")


def diagnostics(run: Run) -> dict[int, dict[str, float]]:
    """Step -> what was observed."""
    found = [record for record in run.records if "stream/rms/00" in record]
    steps = [record["step"] for record in found]
    assert len(set(steps)) == len(steps), "a step was observed twice"
    return {record["step"]: {k: v for k, v in record.items() if k not in ("step", "tokens")} for record in found}


def rest(run: Run) -> list[dict[str, Any]]:
    """Return all other records, without speed and without the int8 loss that comes with diagnostics."""
    records = [record for record in run.numbers if "stream/rms/00" not in record]
    return [{k: v for k, v in record.items() if not k.endswith("w8a8_delta")} for record in records]


@pytest.mark.parametrize("name", STAGES)
def test_every_interval_is_observed_once(runs: Callable[[str], Run], name: str) -> None:
    seen = diagnostics(runs(name))
    assert list(seen) == [2, 4]
    for record in seen.values():
        assert all(math.isfinite(value) for value in record.values()), record
        assert record.keys() == seen[2].keys()


@pytest.mark.parametrize("name", ALONE)
def test_observed_training_is_the_same_to_the_last_bit(runs: Callable[[str], Run], name: str) -> None:
    assert rest(runs(name)) == rest(runs(f"{name}_off"))
    assert not diagnostics(runs(f"{name}_off"))
    observed, alone = (runs(run).weights(STEPS) for run in (name, f"{name}_off"))
    assert all(observed[tensor].equal(alone[tensor]) for tensor in alone)


@pytest.mark.parametrize("name", [*list(FP32)[1:], "offload_2"])
def test_zero_stages_agree(runs: Callable[[str], Run], name: str) -> None:
    assert_close(diagnostics(runs(name)), diagnostics(runs("fp32_0")), 5e-4)


@pytest.mark.parametrize("name", [name for name in STAGES if not name.startswith("still")])
def test_updates_have_the_size_that_adam_asks_for(runs: Callable[[str], Run], name: str) -> None:
    """At every stage, from the first update on; the guard of the table logs it."""
    sizes = {
        record["step"]: {key: value for key, value in record.items() if key not in ("step", "tokens")}
        for record in runs(name).records
        if "step_size/embedding" in record
    }
    assert list(sizes) == [1, 2, 4]
    for found in sizes.values():
        assert {"step_size/hidden_matrix", "step_size/qk_norm", "step_size/unembedding"} <= found.keys()
        assert found == {key: pytest.approx(1.0, rel=0.01) for key in found}


def test_padding_is_no_gain(runs: Callable[[str], Run]) -> None:
    found = diagnostics(runs("gains_3"))
    assert any(key.startswith("gain/min_attn_residual") for key in found[2])
    assert_close(found, diagnostics(runs("gains_0")), 5e-4)


def test_activations_are_observed_without_dropout(runs: Callable[[str], Run]) -> None:
    def streams(name: str) -> dict[int, dict[str, float]]:
        seen = diagnostics(runs(name)).items()
        return {step: {k: v for k, v in record.items() if k.startswith("stream/")} for step, record in seen}

    assert_close(streams("still_dropout"), streams("still"), 1e-4)


@pytest.mark.parametrize("name", ["bf16_0", "bf16_1", "bf16_2", "bf16_3"])
def test_bf16_is_close_to_fp32(runs: Callable[[str], Run], name: str) -> None:
    assert_close(diagnostics(runs(name)), diagnostics(runs("fp32_1")), 0.1)


def test_two_ranks_observe_what_one_does_on_both_batches(runs: Callable[[str], Run]) -> None:
    """Statistics of sums: a mean of the two ranks' kurtoses would be another number."""
    assert_close(diagnostics(runs("half")), diagnostics(runs("whole")), 5e-4)


@pytest.mark.parametrize("step", [2, 4])
def test_updates_and_gains_are_those_of_the_weights(runs: Callable[[str], Run], step: int) -> None:
    """Against the checkpoints before and after: a matrix, a gain shared by heads, and one outside the blocks."""
    found = diagnostics(runs("half"))[step]
    before, after = (runs("half").weights(state) for state in (step - 1, step))
    for name, key in (("model.layers.1.self_attn.q_proj", "self_attn.q_proj/01"), ("lm_head", "lm_head")):
        old, new = before[f"{name}.weight"], after[f"{name}.weight"]
        assert found[f"update/rms_{key}"] == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-3)
        assert found[f"update/rms_{key}"] > 1e-4
    for name, key in (("model.layers.0.self_attn.k_norm", "self_attn.k_norm/00"), ("model.norm", "norm")):
        gain = after[f"{name}.weight"]
        expected = {"mean": gain.mean(), "min": gain.min(), "max": gain.max()}
        for quantity, value in expected.items():
            assert found[f"gain/{quantity}_{key}"] == pytest.approx(float(value), rel=1e-5)
        assert gain.min() < gain.max()


def assert_close(found: dict[int, dict[str, float]], expected: dict[int, dict[str, float]], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for step, record in expected.items():
        assert found[step].keys() == record.keys()
        wrong = {
            key: (found[step][key], value)
            for key, value in record.items()
            if found[step][key] != pytest.approx(value, rel=tolerance, abs=tolerance / 10)
        }
        assert not wrong, f"step {step}"
