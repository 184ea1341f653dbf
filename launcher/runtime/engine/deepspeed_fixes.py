"""Replace functions of DeepSpeed 0.19.8, and add what it leaves out: some lose gradients, some only take longer.

Each says what DeepSpeed does by itself. `tests/benchmarks/engine_certificate.py` shows whether another version needs
the same. deepspeed is imported inside functions, because importing it chooses the accelerator, which `process_group`
prepares.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plumbline.launcher.runtime.system.collectives import sum_over_ranks


def restore_linear() -> None:
    """Restore torch's linear function, which DeepSpeed replaces for the whole process at stage 3.

    DeepSpeed's function saves no gathered weight for the backward pass. Compiled blocks save none anyway, and the
    compiler of torch 2.11 makes all gradients of a block zero if it calls DeepSpeed's function with a bias.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    torchs_own = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", nn.functional.linear)
    nn.functional.linear = torchs_own


def sum_where_gradients_lie(engine: Any, ranks: int) -> None:
    """Sum the gradients of DeepSpeed's BF16_Optimizer in place, over micro-batches and over ranks.

    DeepSpeed copies each gradient to fp32 before adding it, in functions that take the host longer than small tensors
    take a GPU, and zeroes all sums twice after each step, to which the first micro-batch adds. Then it copies all sums
    into messages of whole buffers, has every rank receive all of them, and copies them back, although a rank updates
    only a share of the weights (docs/performance.md). Here gradients are added without a copy, the first one of a step
    overwrites the sum, and each rank receives only its share.

    Args:
        engine: the DeepSpeed engine.
        ranks: number of ranks.
    """
    zero = engine.optimizer

    def add(parameter: nn.Parameter, group: int, index: int) -> None:
        if parameter.grad is None:  # as in DeepSpeed
            return
        total = zero.fp32_groups_gradients[group][index]
        gradient = parameter.grad.view(total.shape)
        if zero.fp32_groups_has_gradients[group][index]:
            total.add_(gradient)
        else:
            total.copy_(gradient)
            zero.fp32_groups_has_gradients[group][index] = True
        parameter._hp_grad = total  # type: ignore[attr-defined]  # where DeepSpeed's functions look for it
        parameter.grad = None

    def forget() -> None:  # the next step overwrites the values
        zero.fp32_groups_has_gradients = [[False] * len(group) for group in zero.fp32_groups_gradients]

    def finish(**_unused: Any) -> None:
        for totals, has_gradient in zip(zero.fp32_groups_gradients, zero.fp32_groups_has_gradients, strict=True):
            for total, has in zip(totals, has_gradient, strict=True):
                if not has:
                    total.zero_()  # what an earlier step has left there
        if ranks > 1:
            _average_shares(zero, ranks, engine.communication_data_type)

    def of_shares(for_clipping: bool = False) -> Any:
        shares = zero.fp32_groups_gradient_flat_partition
        return shares if for_clipping else ([_norm_of_all(shares)], {})

    zero.accumulate_hp_grads_and_remove_lp = add
    zero.clear_hp_grads = forget
    engine.buffered_allreduce_fallback = finish
    if ranks > 1:
        zero.get_grads_for_norm = of_shares  # so the norm is that of the whole gradient


def _average_shares(zero: Any, ranks: int, dtype: torch.dtype) -> None:
    """Replace each rank's share of the gradient by the mean over ranks, sent in a dtype. Collective."""
    wholes, shares = zero.fp32_groups_gradients_flat, zero.fp32_groups_gradient_flat_partition
    for whole, share, group in zip(wholes, shares, zero.real_dp_process_group, strict=True):
        message = whole.to(dtype)  # itself, unless it is rounded
        part = message.narrow(0, share.storage_offset() - whole.storage_offset(), share.numel())
        dist.reduce_scatter_tensor(part, message, group=group)
        share.copy_(part).div_(ranks)
        del message, part  # else rounded copies of two groups exist at once


def _norm_of_all(shares: list[Tensor]) -> Tensor:
    """Return the norm of a gradient from each rank's shares; squares are summed in fp64. Collective."""
    squares = torch.stack(torch._foreach_norm(shares, 2, torch.float64)).square().sum()
    return sum_over_ranks(squares).sqrt().float()


def average_in_fp32(zero: Any, ranks: int) -> None:
    """Make stage 2 divide gradients by the number of ranks after they are summed in fp32.

    DeepSpeed divides the gradients of the backward pass before the sum: in bf16 and with three ranks that rounds once
    more, unlike every other stage. All its sums go through one function (0.19.8), which does not divide.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        ranks: number of ranks.
    """
    sum_up = zero.allreduce_bucket

    def average(*arguments: Any, **named: Any) -> Tensor:
        summed: Tensor = sum_up(*arguments, **named)
        return summed.div_(ranks)

    zero.gradient_average = False
    zero.allreduce_bucket = average


def forget_gradients(zero: Any) -> None:
    """Zero the gradients at the start of a step at stage 3, as every other stage does.

    DeepSpeed 0.19.8 overwrites the last step's gradient of a tensor only when the first micro-batch yields a new one: a
    tensor that it does not use would be updated by its old gradient again.
    """
    zero.grad_partitions_flat_buffer.zero_()


def forget_offloaded_gradients(zero: Any, masters: Iterable[Tensor]) -> None:
    """Zero the gradients at the start of a step if optimizer states are offloaded.

    DeepSpeed 0.19.8 keeps the gradients in host memory and overwrites only those of tensors that get a new one: the old
    gradients of other tensors would be applied again, or added to.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        masters: the master weights of this rank.
    """
    for master in masters:
        if master.grad is not None:
            master.grad.zero_()
    for accumulated in getattr(zero, "accumulated_grads_in_cpu", {}).values():  # in fp32 at stages 1 and 2
        accumulated.zero_()


def finish_offloaded_gradients(zero: Any) -> None:
    """Pass the optimizer the offloaded gradients of tensors that got none in the last micro-batch of a step.

    DeepSpeed 0.19.8 passes on only tensors of the last micro-batch, so those of earlier ones would be lost.
    """
    zero.finalize_gradient_accumulation_boundary()
