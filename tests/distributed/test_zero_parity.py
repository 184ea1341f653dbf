"""Every ZeRO stage computes what a plain PyTorch loop computes.

Twenty steps of a model that is twice as wide and deep as its base (so parameter groups differ), on two ranks with two
accumulation steps and a gradient norm that the clip cuts, against thirty lines of PyTorch in one process.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.optimizer import group_settings, make_optimizer, verify_settings
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.rows import ParameterRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conftest import Run
    from tests.distributed.conftest import PlainLoop, Reference, TrainMatrix

FP32 = {f"fp32_{stage}": [f"deepspeed.zero_stage={stage}"] for stage in range(4)}
BF16 = {f"bf16_{stage}": ["deepspeed.precision=bf16", f"deepspeed.zero_stage={stage}"] for stage in range(4)}
OFFLOAD = {
    f"offload_{stage}": [f"deepspeed.zero_stage={stage}", "deepspeed.offload_optimizer=true"] for stage in (1, 2, 3)
}
ROUNDED = {f"rounded_{name}": [*BF16[name], "deepspeed.communication_dtype=bf16"] for name in BF16}
SETTINGS = FP32 | OFFLOAD | BF16 | ROUNDED
EXACT = [*FP32, *OFFLOAD]
GROUPED = ["fp32_0", "fp32_1", "fp32_3", "bf16_1", "offload_2"]  # every class of optimizer that DeepSpeed has for these
PARTED = 1e-4  # how far gradient norms of fp32 runs may be apart after twenty steps
CHANGED = ["optimizer.lr=0.002", "optimizer.weight_decay=0.3", "optimizer.eps=1.0e-6", "optimizer.betas=[0.8, 0.9]"]


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, [])


@pytest.fixture(scope="module")
def runs(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str], Run]:
    """Return the finished runs of all settings, by two ranks, and of one by a single rank."""
    by_two = train_matrix(tiny_config, SETTINGS, groups=GROUPED)
    by_one = train_matrix(tiny_config, {"single": FP32["fp32_1"]}, ranks=1)
    return lambda name: (by_one if name == "single" else by_two)(name)


@pytest.fixture(scope="module")
def reference(config: Config, plain_loop: PlainLoop) -> Reference:
    """Train likewise in plain PyTorch: one process, one batch, one AdamW group for each tensor of the table."""
    return plain_loop(config, lambda parameters, rows: [adamw(parameters, rows, config)])


def adamw(parameters: dict[str, nn.Parameter], rows: Sequence[ParameterRow], config: Config) -> torch.optim.AdamW:
    groups = [
        {
            "params": [parameters[r.name]],
            "lr_multiplier": r.lr_multiplier,
            "weight_decay": r.weight_decay,
            "eps": r.eps,
        }
        for r in rows
    ]
    return torch.optim.AdamW(groups, betas=(config.optimizer.betas[0], config.optimizer.betas[1]))


def test_the_comparison_can_fail(config: Config, reference: Reference) -> None:
    assert min(reference.grad_norms) > config.optimizer.grad_clip, "the clip binds at every step"
    assert config.data.accumulation_steps(2) == 2
    rows = plan_run(config).rows
    assert len({(row.lr, row.weight_decay, row.eps) for row in rows}) == 4, "groups differ"
    assert reference.losses[-1] < reference.losses[0] - 1, "training moves"


@pytest.mark.parametrize("name", [*EXACT, "single"])
def test_fp32_equals_the_plain_loop(runs: Callable[[str], Run], reference: Reference, name: str) -> None:
    run = runs(name)
    losses, norms = (list(run.column(key).values()) for key in ("loss", "grad_norm"))
    assert losses == pytest.approx(reference.losses, rel=1e-6)
    # The first ten agree to 6e-7. Later the last bit of a summation order, which differs by processor, turns the update
    # of a weight whose gradient is near zero: norms have then been seen to part by 2.1e-5
    assert norms[:10] == pytest.approx(reference.grad_norms[:10], rel=2e-6)
    assert norms == pytest.approx(reference.grad_norms, rel=PARTED)
    found = run.weights(20)
    assert found.keys() == reference.weights.keys()
    for tensor, expected_tensor in reference.weights.items():
        torch.testing.assert_close(found[tensor], expected_tensor, rtol=1e-4, atol=5e-5, msg=f"{name}: {tensor}")


@pytest.mark.parametrize("name", [*EXACT[1:], "single"])
def test_fp32_stages_offload_and_world_sizes_agree(runs: Callable[[str], Run], name: str) -> None:
    one, other = runs("fp32_0"), runs(name)
    for key, tolerance in (("loss", 1e-6), ("grad_norm", PARTED), ("eval/email/loss", 1e-6)):
        assert other.column(key) == pytest.approx(one.column(key), rel=tolerance), key
    first, expected = (list(run.column("grad_norm").values())[:10] for run in (other, one))
    assert first == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("name", list(BF16))
def test_bf16_stages_agree_within_its_precision(runs: Callable[[str], Run], name: str) -> None:
    """Stage 0 is autocast over fp32 weights, the others round the weights: all stay within bf16's rounding of fp32."""
    exact, losses = runs("fp32_1").column("loss"), runs(name).column("loss")
    assert losses == pytest.approx(exact, rel=0.005)
    assert losses != exact, "bf16 is not fp32"
    norms = runs(name).column("grad_norm")
    assert norms == pytest.approx(runs("fp32_1").column("grad_norm"), rel=0.15)


@pytest.mark.parametrize("name", ["bf16_2", "bf16_3"])
def test_bf16_sharding_changes_only_the_order_of_sums(runs: Callable[[str], Run], name: str) -> None:
    """Tightly while the curves are together; then training amplifies what is at first one bf16 rounding (2^-8)."""
    one, other = runs("bf16_1").column("loss"), runs(name).column("loss")
    for steps, tolerance in ((10, 5e-4), (20, 2**-8)):
        first = range(1, steps + 1)
        assert [other[step] for step in first] == pytest.approx([one[step] for step in first], rel=tolerance)


def test_three_ranks_round_no_gradient_once_more(train_matrix: TrainMatrix, tiny_config: Path) -> None:
    """As DeepSpeed does when it divides gradients by three in bf16: then the second loss is off by 1e-5."""
    batch = ["data.global_batch_size=6", "train.steps=3", "train.eval_interval=null"]
    by_three = train_matrix(tiny_config, {f"three_{name}": [*batch, *BF16[name]] for name in ("bf16_1", "bf16_2")}, 3)
    one, other = (list(by_three(f"three_{name}").column("loss").values()) for name in ("bf16_1", "bf16_2"))
    assert other == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("name", list(BF16))
def test_sums_in_bf16_are_close_and_not_the_same(runs: Callable[[str], Run], name: str) -> None:
    """Each gradient that is sent is off by one bf16 rounding at most, which has no bias: ten losses hardly feel it."""
    usual, rounded = (runs(each).column("loss") for each in (name, f"rounded_{name}"))
    assert rounded != usual
    assert [rounded[step] for step in range(1, 11)] == pytest.approx([usual[step] for step in range(1, 11)], rel=1e-3)
    assert rounded == pytest.approx(usual, rel=2**-7)


@pytest.mark.parametrize("name", GROUPED)
def test_running_groups_are_those_of_the_table(runs: Callable[[str], Run], tiny_config: Path, name: str) -> None:
    """Before training, after it, and after loading a checkpoint under other hyperparameters, which then win."""
    groups = json.loads((runs(name).folder / "groups.json").read_text())
    for moment, overrides in (("before", []), ("after", []), ("changed", CHANGED)):
        config = load_config(tiny_config, overrides)
        rows = plan_run(config).rows
        by_role: dict[str, dict[str, Any]] = {
            role: group for group in groups[moment] for role in group["name"].split("+")
        }
        for row in rows:
            group = by_role[row.role]
            found = (group["lr_multiplier"], group["weight_decay"], group["eps"], group["betas"])
            expected = (row.lr_multiplier, row.weight_decay, row.eps, config.optimizer.betas)
            assert found == expected, f"{moment}: {row.name}"
        if moment == "after":  # the learning rate of the last update: each group's own multiple of one value
            factor = plan_run(config).schedule.factor(19 * config.data.batch_plan.tokens_per_step)
            assert 0 < factor < 1
            for group in groups[moment]:
                assert group["lr"] == config.optimizer.lr * factor * group["lr_multiplier"]


def rows_and_optimizer(config: Config) -> tuple[Sequence[ParameterRow], torch.optim.Optimizer]:
    plan = plan_run(config)
    model = CausalLM(config.model, multipliers(config.model, config.parameterization))
    return plan.rows, make_optimizer(model, group_settings(plan.rows, config.optimizer, plan.settings.betas), True)


def test_groups_hold_every_tensor_once(config: Config) -> None:
    rows, optimizer = rows_and_optimizer(config)
    shapes = sorted(tuple(p.shape) for group in optimizer.param_groups for p in group["params"])
    assert shapes == sorted(row.shape for row in rows)
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == sum(r.count for r in rows)


@pytest.mark.parametrize("key", ["lr_multiplier", "weight_decay", "eps", "betas"])
def test_wrong_group_settings_are_refused(config: Config, key: str) -> None:
    rows, optimizer = rows_and_optimizer(config)
    settings, groups = group_settings(rows, config.optimizer, plan_run(config).settings.betas), optimizer.param_groups
    verify_settings(groups, settings)
    value = groups[-1][key]
    groups[-1][key] = (value[0], math.nextafter(value[1], 0.0)) if key == "betas" else math.nextafter(value, math.inf)
    with pytest.raises(RuntimeError, match=key):
        verify_settings(groups, settings)


@pytest.mark.parametrize("change", ["drop", "swap"])
def test_missing_and_reordered_groups_are_refused(config: Config, change: str) -> None:
    rows, optimizer = rows_and_optimizer(config)
    groups = optimizer.param_groups[1:] if change == "drop" else optimizer.param_groups[::-1]
    with pytest.raises(RuntimeError, match="groups"):
        verify_settings(groups, group_settings(rows, config.optimizer, plan_run(config).settings.betas))
