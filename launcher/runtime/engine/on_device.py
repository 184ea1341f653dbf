"""Let DeepSpeed update weights without asking the host whether the gradient is finite, or whether it is to be clipped.

In every step DeepSpeed 0.19.8 reads the norm of the gradient on the host, in some classes once for each group. On a GPU
that read waits for the whole backward pass, and then the device waits for the host. But torch's fused AdamW can be told
by a number on the device to leave weights, moments and its count of steps as they are (`found_inf`, made for loss
scaling). So here DeepSpeed's functions are replaced for the time of one update: the one that makes the norm also hands
it to AdamW, and those that ask the host answer without looking. Numbers stay the same to the last bit, but for the
order in which more than two ranks add up squares of norms.

What is not reached from here: with states in the host's memory DeepSpeed needs the norm there; at stage 3 it copies a
constant to the device for each sub-group; and at stages 2 and 3 it waits for the sums of gradients after each backward
pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plumbline.launcher.runtime.system.collectives import sum_over_ranks


@contextmanager
def deciding_on_device(zero: Any, optimizer: torch.optim.AdamW) -> Iterator[None]:
    """Update within, at ZeRO stages 1 to 3, or skip the update of a gradient that is not finite, as the device finds.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        optimizer: the fused AdamW that it wraps; its `found_inf` says afterwards whether it has skipped.
    """
    from deepspeed.runtime import bf16_optimizer, utils
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    def noted(make_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*arguments: Any, **named: Any) -> Tensor:
            norm = make_norm(*arguments, **named)
            optimizer.found_inf = not_finite(norm)  # type: ignore[attr-defined]
            return norm

        return make

    def clip(*, max_norm: float, global_norm: Tensor, **_unused: Any) -> None:
        shares = zero.fp32_groups_gradient_flat_partition  # of this rank: no other is used
        torch._foreach_mul_(shares, (max_norm / (global_norm + 1e-6)).clamp(max=1.0))

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (bf16_optimizer, "get_global_norm_of_tensors", noted(global_norm)),
        (bf16_optimizer, "clip_tensors_by_global_norm", clip),
        (stage_1_and_2.DeepSpeedZeroOptimizer, "scaled_global_norm", noted(norm_of_shards)),
        (stage3, "combine_grad_norm_groups", noted(utils.combine_grad_norm_groups)),
        (stage3, "mask_nan_or_inf_with_val_inplace", _mark),
        *((module, "is_invalid_grad_norm", _looks_valid) for module in (bf16_optimizer, stage_1_and_2, stage3)),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    for module, name, function in replacements:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)


def not_finite(norm: Tensor) -> Tensor:
    """Return 1 for a norm that is not finite, or that DeepSpeed has marked as such by -1; else 0, on its device."""
    return (~torch.isfinite(norm) | (norm < 0)).float()


def global_norm(input_tensors: list[Tensor], norm_type: float = 2, **_unused: Any) -> Tensor:
    """Return the norm of some tensors as DeepSpeed's function of BF16_Optimizer does, in few kernels."""
    norms = torch.stack(torch._foreach_norm(input_tensors, norm_type))
    total: Tensor = norms.pow(norm_type).sum().pow(1.0 / norm_type)
    _mark(total)
    return total


def norm_of_shards(zero: Any, **_unused: Any) -> Tensor:
    """Return the norm of a gradient that is in shards as at stages 1 and 2, infinite if it is not finite. Collective.

    DeepSpeed sends a message for each group, and starts kernels for each tensor: here all groups go in one message, and
    all tensors of a group through one kernel. Squares are added up in fp64 on a rank, as there.
    """
    squares = torch.zeros(len(zero.bit16_groups), device=zero.device)
    for group, square in enumerate(squares):
        part = [each for each in zero.averaged_gradients[group] if not getattr(each, "_zero_padding", False)]
        if part:
            square.copy_(torch.stack(torch._foreach_norm(part, 2, torch.float64)).square().sum())
    norm: Tensor = torch.linalg.vector_norm(sum_over_ranks(squares).sqrt())
    return norm.masked_fill(~torch.isfinite(norm), torch.inf)


def _looks_valid(_norm: Any) -> bool:
    """Say that a norm is finite: if it is not, AdamW skips."""
    return False


def _mark(norm: Tensor, **_unused: Any) -> None:
    """Replace a norm that is not finite by -1, in place, with no constant to copy to the device."""
    norm.masked_fill_(~torch.isfinite(norm), -1.0)
