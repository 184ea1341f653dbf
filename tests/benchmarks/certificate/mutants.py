"""Break the engine in one place at a time, in the ranks: what a comparison that is worth something must see.

A mutant either asks DeepSpeed for something else than the engine would, whose own check is then switched off, or
changes code of the engine, of its optimizer or of DeepSpeed once the engine is made. All ranks do the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2

from plumbline.launcher.runtime.engine import interface, zero_shards
from plumbline.launcher.runtime.engine import deepspeed as engines
from plumbline.launcher.runtime.optim import muon
from tests.benchmarks.certificate.models import Case

Swap = Callable[[Any, str, Any], object]
Fits = Callable[[Case], bool]


@dataclass(frozen=True)
class Mutant:
    """Hold one way to be wrong."""

    change: str
    fits: Fits
    """Says whether the change has an effect on a case."""
    alter: Callable[[Any, Swap], object] = lambda _engine, _swap: None
    """Changes an engine that is made; what it swaps is put back."""
    ask: Callable[[dict[str, Any]], object] = lambda _config: None
    """Changes DeepSpeed's configuration."""


MUTANTS: list[Mutant] = []


def mutant(change: str, fits: Fits = lambda _case: True) -> Callable[[Callable[[Any, Swap], None]], None]:
    """Add a function to the mutants."""
    return lambda alter: MUTANTS.append(Mutant(change, fits, alter))


def asking(change: str, fits: Fits, key: str, value: object) -> None:
    """Add a mutant that asks DeepSpeed for another value; a dot in the key leads into a section."""

    def ask(config: dict[str, Any]) -> None:
        *sections, last = key.split(".")
        for section in sections:
            config = config[section]
        config[last] = value

    MUTANTS.append(Mutant(change, fits, ask=ask))


def adamw(case: Case) -> bool:
    """Return whether AdamW updates all tensors."""
    return case.optimizer == "adamw"


def accumulates(case: Case) -> bool:
    """Return whether a step has several micro-batches."""
    return case.accumulation > 1


def binds(case: Case) -> bool:
    """Return whether the norm of the gradient is limited to less than it is."""
    return 0 < case.grad_clip < 1


def bf16_optimizer_of(case: Case) -> bool:
    """Return whether DeepSpeed's BF16_Optimizer is at work."""
    return case.stage == 1 and case.precision == "bf16"


def flat(case: Case) -> bool:
    """Return whether its optimizer of stages 1 and 2 is."""
    return case.stage in (1, 2) and not bf16_optimizer_of(case)


def adam_groups(engine: Any) -> list[dict[str, Any]]:
    """Return the groups that AdamW updates."""
    return [group for group in engine.groups if group["algorithm"] == "adamw"]


def after_rates(engine: Any, swap: Swap, change: Callable[[list[dict[str, Any]], float], None]) -> None:
    """Change the optimizer's groups in each step, once the engine has set their learning rates."""
    original = interface.set_learning_rates

    def set_learning_rates(groups: list[dict[str, Any]], lr: float) -> None:
        original(groups, lr)
        change(adam_groups(engine), lr)

    swap(interface, "set_learning_rates", set_learning_rates)


def scale_loss(engine: Any, swap: Swap, factor: Callable[[int], float]) -> None:
    """Multiply what is differentiated by a factor of the number of the micro-batch, counted over all steps."""
    ds, count = engine._engine, iter(range(10**6))
    backward = ds.backward
    swap(ds, "backward", lambda loss, **named: backward(loss * factor(next(count)), **named))


def around_update(engine: Any, swap: Swap, before: Callable[[], Any], after: Callable[[Any], None]) -> None:
    """Do something before each update, and something with what that returns after it."""
    update = engine._update

    def changed() -> Any:
        kept = before()
        found = update()
        after(kept)
        return found

    swap(engine, "_update", changed)


def before_optimizer(engine: Any, swap: Swap, change: Callable[[Any], None]) -> None:
    """Do something with the optimizer right before each of its steps; DeepSpeed may take one for each group."""
    optimizer = engine._optimizer
    step = optimizer.step

    def changed(*arguments: Any, **named: Any) -> Any:
        change(optimizer)
        return step(*arguments, **named)

    swap(optimizer, "step", changed)


def scale_gradients(optimizer: Any, factor: float) -> None:
    """Multiply all gradients that an optimizer is about to use."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


# Hyperparameters of groups


@mutant("the learning rate of one group is 2 % too high")
def _(engine: Any, swap: Swap) -> None:
    after_rates(engine, swap, lambda groups, _lr: groups[-1].update(lr=groups[-1]["lr"] * 1.02))


@mutant("all groups have one learning rate")
def _(engine: Any, swap: Swap) -> None:
    after_rates(engine, swap, lambda groups, lr: [group.update(lr=lr) for group in groups] and None)


@mutant("two groups have swapped their learning rates")
def _(engine: Any, swap: Swap) -> None:
    def change(groups: list[dict[str, Any]], _lr: float) -> None:
        groups[0]["lr"], groups[1]["lr"] = groups[1]["lr"], groups[0]["lr"]

    after_rates(engine, swap, change)


@mutant("the learning rate is that of the step before")
def _(engine: Any, swap: Swap) -> None:
    earlier: list[float] = []
    original = interface.set_learning_rates

    def set_learning_rates(groups: list[dict[str, Any]], lr: float) -> None:
        earlier.append(lr)
        original(groups, earlier[-2:][0])

    swap(interface, "set_learning_rates", set_learning_rates)


@mutant("one group is not updated")
def _(engine: Any, swap: Swap) -> None:
    after_rates(engine, swap, lambda groups, _lr: groups[0].update(lr=0.0))


@mutant("weight decay on the group that has none")
def _(engine: Any, _swap: Swap) -> None:
    next(group for group in adam_groups(engine) if not group["weight_decay"])["weight_decay"] = 0.1


@mutant("no weight decay on a group that has it")
def _(engine: Any, _swap: Swap) -> None:
    next(group for group in adam_groups(engine) if group["weight_decay"])["weight_decay"] = 0.0


@mutant("two groups have swapped their eps")
def _(engine: Any, _swap: Swap) -> None:
    one, other = adam_groups(engine)[:2]
    one["eps"], other["eps"] = other["eps"], one["eps"]


@mutant("the second beta is 0.999")
def _(engine: Any, _swap: Swap) -> None:
    for group in adam_groups(engine):
        group["betas"] = (group["betas"][0], 0.999)


@mutant("the decay is a part of the gradient, as in Adam", adamw)
def _(engine: Any, _swap: Swap) -> None:
    for group in engine.groups:
        group["decoupled_weight_decay"] = False


# Adam's state


@mutant("all groups share one count of Adam's steps", adamw)
def _(engine: Any, swap: Swap) -> None:
    def change(_optimizer: Any) -> None:
        states = [state for state in engine.optimizer_state.values() if "step" in state]
        for state in states:
            state["step"] = states[0]["step"]

    before_optimizer(engine, swap, change)


@mutant("Adam's count of steps is one ahead")
def _(engine: Any, swap: Swap) -> None:
    def ahead(_kept: None) -> None:
        if engine._optimizer.__dict__.setdefault("ahead", False) is False:
            engine._optimizer.ahead = True
            for state in engine.optimizer_state.values():
                if "step" in state:
                    state["step"] += 1

    around_update(engine, swap, lambda: None, ahead)


@mutant("Adam's second moment is kept in bf16")
def _(engine: Any, swap: Swap) -> None:
    def rounded(_kept: None) -> None:
        for state in engine.optimizer_state.values():
            if "exp_avg_sq" in state:
                state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())

    around_update(engine, swap, lambda: None, rounded)


@mutant("the master weights are kept in bf16")
def _(engine: Any, swap: Swap) -> None:
    def rounded(_kept: None) -> None:
        for weights in engine.master_weights():
            weights.data.copy_(weights.data.bfloat16())
        engine.refresh_weights()

    around_update(engine, swap, lambda: None, rounded)


@mutant("Muon's momentum is 0.8", lambda case: case.optimizer == "muon")
def _(engine: Any, _swap: Swap) -> None:
    for group in engine.groups:
        if group["algorithm"] == "muon":
            group["momentum"] = 0.8


@mutant("Muon's update is a third too large", lambda case: case.optimizer == "muon" and case.stage > 0)
def _(_engine: Any, swap: Swap) -> None:
    original = muon.orthogonal_step
    swap(muon, "orthogonal_step", lambda update: original(update) * 4 / 3)


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
    swap(interface, "sum_over_ranks", lambda targets: targets * 2)


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
    swap(zero_shards, "forget_gradients", lambda _zero: None)


asking("gradients are accumulated in bf16", lambda case: bf16_optimizer_of(case) and accumulates(case),
       "data_types.grad_accum_dtype", "bf16")  # fmt: skip
asking("gradients are summed over ranks in bf16", lambda case: case.stage in (0, 2) and case.precision == "bf16",
       "communication_data_type", "bf16")  # fmt: skip
asking("activations are computed in fp32 where bf16 is asked for",
       lambda case: case.stage == 0 and case.precision == "bf16", "torch_autocast.enabled", False)  # fmt: skip


# Sums over ranks


@mutant("one tensor gets no gradient", lambda case: case.stage < 3)
def _(engine: Any, _swap: Swap) -> None:
    engine.model.get_parameter("blocks.1.down.weight").register_hook(torch.zeros_like)


@mutant("a bucket is not summed over ranks", lambda case: case.stage == 0 or bf16_optimizer_of(case))
def _(engine: Any, swap: Swap) -> None:
    ds, count = engine._engine, iter(range(10**6))
    reduce = ds.allreduce_bucket

    def dropped(bucket: Any, *arguments: Any, **named: Any) -> Any:
        return reduce(bucket, *arguments, **named) if next(count) else ds.flatten(bucket)

    swap(ds, "allreduce_bucket", dropped)


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
    original = engines.clip_gradients

    def unlimited(model: Any, groups: Any, optimizer: Any) -> Any:
        return original(model, groups, optimizer.model_copy(update={"grad_clip": 0.0}))

    swap(engines, "clip_gradients", unlimited)


@mutant("the plain norm is limited where the base-equivalent one is asked for",
        lambda case: case.grad_clip_norm == "base" and case.stage > 0 and binds(case))  # fmt: skip
def _(engine: Any, swap: Swap) -> None:
    swap(engine, "_limit_base_norm", lambda: None)


asking("the gradient is not clipped",
       lambda case: case.stage > 0 and binds(case) and case.grad_clip_norm == "plain", "gradient_clipping", 0.0)  # fmt: skip
asking("the limit of the norm is that of DeepSpeed's default",
       lambda case: case.stage > 0 and binds(case) and case.grad_clip_norm == "plain", "gradient_clipping", 1.0)  # fmt: skip


@mutant("a frozen tensor shrinks", lambda case: case.frozen is not None and case.stage < 3)
def _(engine: Any, swap: Swap) -> None:
    frozen = next(parameter for parameter in engine.model.parameters() if not parameter.requires_grad)
    around_update(engine, swap, lambda: None, lambda _kept: frozen.data.mul_(0.99))
