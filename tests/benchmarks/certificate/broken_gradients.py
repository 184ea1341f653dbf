"""Break how gradients come about: micro-batches, sums over ranks, norm and clipping, and what ranks compute with."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2

from plumbline.launcher.runtime.engine import base, deepspeed_fixes
from plumbline.launcher.runtime.engine import deepspeed as engines
from plumbline.launcher.runtime.optim.clipping import clip_gradients
from tests.benchmarks.certificate.models import Case
from tests.benchmarks.certificate.mutant import (
    Mutant,
    Swap,
    accumulates,
    adding_to,
    around_update,
    asking,
    before_optimizer,
    bf16_optimizer_of,
    binds,
    flat,
    scale_gradients,
    scale_loss,
)

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


def clips_plainly_in_deepspeed(case: Case) -> bool:
    """Return whether DeepSpeed limits the plain norm to less than it is."""
    return case.stage > 0 and binds(case) and case.grad_clip_norm == "plain"


# Accumulation and batches


@mutant("accumulated gradients are not scaled", accumulates)
def _(engine: Any, swap: Swap) -> None:
    scale_loss(engine, swap, lambda _number: float(engine._engine.gradient_accumulation_steps()))


@mutant("accumulated gradients are scaled twice", accumulates)
def _(engine: Any, swap: Swap) -> None:
    scale_loss(engine, swap, lambda _number: 1 / engine._engine.gradient_accumulation_steps())


@mutant("gradients are averaged twice over ranks")
def _(engine: Any, swap: Swap) -> None:
    scale_loss(engine, swap, lambda _number: 1 / engine.world.size)


@mutant("gradients are added over ranks and not averaged")
def _(engine: Any, swap: Swap) -> None:
    scale_loss(engine, swap, lambda _number: float(engine.world.size))


@mutant("the last micro-batch is lost", accumulates)
def _(engine: Any, swap: Swap) -> None:
    scale_loss(engine, swap, lambda number: float(number % engine._engine.gradient_accumulation_steps() != 2))


@mutant("the first micro-batch counts twice", accumulates)
def _(engine: Any, swap: Swap) -> None:
    scale_loss(engine, swap, lambda number: 1.0 + (number % engine._engine.gradient_accumulation_steps() == 0))


@mutant("each rank divides by its own labels")
def _(_engine: Any, swap: Swap) -> None:
    swap(base, "sum_over_ranks", lambda targets: targets * 2)


@mutant("the gradient of the step before is not cleared", lambda case: case.stage == 0)
def _(engine: Any, swap: Swap) -> None:
    def kept() -> dict[Any, Any]:
        return {p: p.grad.clone() for p in engine.model.parameters() if p.grad is not None}

    def put_back(gradients: dict[Any, Any]) -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    around_update(engine, swap, kept, put_back)


@mutant("BF16_Optimizer does not clear the gradient of the step before", bf16_optimizer_of)
def _(engine: Any, swap: Swap) -> None:
    swap(engine._engine.optimizer, "clear_hp_grads", lambda: None)


@mutant(
    "a tensor without a gradient is updated by its last one",
    lambda case: case.stage == 3 and "resting" in case.features,
)
def _(_engine: Any, swap: Swap) -> None:
    swap(deepspeed_fixes, "forget_gradients", lambda _zero: None)


@mutant("gradients are accumulated in bf16", lambda case: bf16_optimizer_of(case) and accumulates(case))
def _(engine: Any, swap: Swap) -> None:
    zero = engine._engine.optimizer
    add = zero.accumulate_hp_grads_and_remove_lp

    def to_a_rounded_sum(parameter: Any, group: int, index: int) -> None:
        total = zero.fp32_groups_gradients[group][index]
        total.copy_(total.bfloat16())
        add(parameter, group, index)

    swap(zero, "accumulate_hp_grads_and_remove_lp", to_a_rounded_sum)


MUTANTS.append(
    asking(
        "gradients are summed over ranks in bf16",
        lambda case: case.stage in (0, 2) and case.precision == "bf16",
        "communication_data_type",
        "bf16",
    )
)
MUTANTS.append(
    asking(
        "activations are computed in fp32 where bf16 is asked for",
        lambda case: case.stage == 0 and case.precision == "bf16",
        "torch_autocast.enabled",
        False,
    )
)


# Sums over ranks


@mutant("one tensor gets no gradient", lambda case: case.stage < 3)
def _(engine: Any, _swap: Swap) -> None:
    engine.model.get_parameter("blocks.1.down.weight").register_hook(torch.zeros_like)


@mutant("a bucket is not summed over ranks", lambda case: case.stage == 0)
def _(engine: Any, swap: Swap) -> None:
    ds, count = engine._engine, iter(range(10**6))
    reduce = ds.allreduce_bucket

    def dropped(bucket: Any, *arguments: Any, **named: Any) -> Any:
        return reduce(bucket, *arguments, **named) if next(count) else ds.flatten(bucket)

    swap(ds, "allreduce_bucket", dropped)


@mutant("BF16_Optimizer does not sum the shares of a group over ranks", bf16_optimizer_of)
def _(_engine: Any, swap: Swap) -> None:
    count = iter(range(10**6))
    scatter, done = dist.reduce_scatter_tensor, SimpleNamespace(wait=lambda: None)
    swap(dist, "reduce_scatter_tensor", lambda *given, **named: scatter(*given, **named) if next(count) else done)


@mutant(
    "BF16_Optimizer sums a group over ranks before its last micro-batch",
    lambda case: bf16_optimizer_of(case) and accumulates(case),
)
def _(engine: Any, swap: Swap) -> None:
    shares = engine._engine.optimizer.accumulate_hp_grads_and_remove_lp.__self__
    dtype = engine._engine.communication_data_type
    at_once = SimpleNamespace(is_gradient_accumulation_boundary=lambda: True, communication_data_type=dtype)
    swap(shares, "_engine", at_once)


@mutant("a bucket of stages 1 and 2 is not summed over ranks", flat)
def _(engine: Any, swap: Swap) -> None:
    zero, count = engine._engine.optimizer, iter(range(10**6))
    reduce = zero.average_tensor
    swap(zero, "average_tensor", lambda *given, **named: reduce(*given, **named) if next(count) else None)


@mutant("a bucket of stage 3 is lost", lambda case: case.stage == 3)
def _(engine: Any, swap: Swap) -> None:
    zero, count = engine._engine.optimizer, iter(range(10**6))
    name = "partition_grads"
    keep = getattr(zero, name)

    def dropped(parameters: Any, gradients: Any) -> Any:
        return keep(parameters, gradients if next(count) else [torch.zeros_like(each) for each in gradients])

    swap(zero, name, dropped)


@mutant("the shards of other ranks are not gathered after an update", lambda case: case.stage in (1, 2))
def _(_engine: Any, swap: Swap) -> None:
    for module in (bf16_optimizer, stage_1_and_2):
        swap(module, "all_gather_dp_groups", lambda **_named: None)


@mutant("rank 1 computes with an old tensor", lambda case: case.stage < 3)
def _(engine: Any, swap: Swap) -> None:
    weight = engine.model.get_parameter("head.weight")

    def put_back(old: Any) -> None:
        if engine.world.rank == 1:
            weight.data.copy_(old)

    around_update(engine, swap, lambda: weight.detach().clone(), put_back)


@mutant("rank 1 keeps an old part of a tensor at stage 3", lambda case: case.stage == 3 and not case.persistent)
def _(engine: Any, swap: Swap) -> None:
    weight = engine.model.get_parameter("embed.weight")

    def put_back(old: Any) -> None:
        if engine.world.rank == 1:
            weight.ds_tensor.data.copy_(old)

    around_update(engine, swap, lambda: weight.ds_tensor.data.clone(), put_back)


# Norm and clipping


@mutant("the norm is that of one rank's gradient", lambda case: flat(case) or case.stage == 3)
def _(engine: Any, swap: Swap) -> None:
    zero = engine._engine.optimizer
    norm = zero.get_grad_norm_direct

    def alone(*arguments: Any, **named: Any) -> Any:
        with patch.object(stage3.dist, "all_reduce", lambda *_, **__: None):
            return norm(*arguments, **named)

    swap(zero, "get_grad_norm_direct", alone)


@mutant("the norm is that of one rank's shard", lambda case: bf16_optimizer_of(case) and case.grad_clip_norm == "plain")
def _(engine: Any, swap: Swap) -> None:
    zero = engine._engine.optimizer
    swap(zero, "get_grads_for_norm", lambda for_clipping=False: (
        [[shard] for shard in zero.fp32_groups_gradient_flat_partition] if for_clipping
        else zero.fp32_groups_gradient_flat_partition, {}))  # fmt: skip


@mutant("the gradient is clipped twice", binds)
def _(engine: Any, swap: Swap) -> None:
    def clip_again(optimizer: Any) -> None:
        norm = float(engine._clipped_norm if engine.stage == 0 else engine._engine.optimizer._global_grad_norm)
        limit = engine.config.optimizer.grad_clip
        scale_gradients(optimizer, min(1.0, limit / norm))

    before_optimizer(engine, swap, clip_again)


@mutant("the gradient is not clipped at stage 0", lambda case: case.stage == 0 and binds(case))
def _(_engine: Any, swap: Swap) -> None:
    original = clip_gradients

    def unlimited(model: Any, groups: Any, optimizer: Any) -> Any:
        return original(model, groups, optimizer.model_copy(update={"grad_clip": 0.0}))

    swap(engines, "clip_gradients", unlimited)


@mutant("the plain norm is limited where the base-equivalent one is asked for",
        lambda case: case.grad_clip_norm == "base" and case.stage > 0 and binds(case))  # fmt: skip
def _(engine: Any, swap: Swap) -> None:
    swap(engine, "_limit_base_norm", lambda: None)


MUTANTS.append(asking("the gradient is not clipped", clips_plainly_in_deepspeed, "gradient_clipping", 0.0))
MUTANTS.append(
    asking("the limit of the norm is that of DeepSpeed's default", clips_plainly_in_deepspeed, "gradient_clipping", 1.0)
)


@mutant("a frozen tensor shrinks", lambda case: case.frozen is not None and case.stage < 3)
def _(engine: Any, swap: Swap) -> None:
    frozen = next(parameter for parameter in engine.model.parameters() if not parameter.requires_grad)
    around_update(engine, swap, lambda: None, lambda _kept: frozen.data.mul_(0.99))
