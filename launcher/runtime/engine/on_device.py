"""Let DeepSpeed update weights without reading on the host whether to skip or clip the gradient.

In every step DeepSpeed 0.19.8 reads the norm of the gradient on the host, in some classes once per group. On a GPU that
read waits for the whole backward pass, and then the device waits for the host. But torch's fused AdamW can skip an
update, including its step count, by a flag on the device (`found_inf`, made for loss scaling). So DeepSpeed's functions
are replaced during one update: the one that computes the norm also sets AdamW's flag, and those that would read it on
the host return without reading. Results are bit-identical, except for the order in which more than two ranks add up
squared norms.

Some waits remain: DeepSpeed needs the norm on the host if states are offloaded; at stage 3 it copies a constant to the
device for each sub-group; and at stages 2 and 3 it waits for the sums of gradients after each backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plumbline.launcher.runtime.optim.clipping import clip_factor
from plumbline.launcher.runtime.ranks.collectives import sum_over_ranks


@contextmanager
def deciding_on_device(zero: Any, optimizer: torch.optim.AdamW) -> Iterator[None]:
    """Return a context in which, at ZeRO stages 1 to 3, the device decides to skip a gradient that is not finite.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        optimizer: the fused AdamW that it wraps; its `found_inf` says afterwards whether it skipped.
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
        shares = zero.fp32_groups_gradient_flat_partition  # of this rank: it uses no others
        torch._foreach_mul_(shares, clip_factor(global_norm, max_norm))

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (bf16_optimizer, "get_global_norm_of_tensors", noted(global_norm)),
        (bf16_optimizer, "clip_tensors_by_global_norm", clip),
        (stage_1_and_2.DeepSpeedZeroOptimizer, "scaled_global_norm", noted(norm_of_shards)),
        (stage3, "combine_grad_norm_groups", noted(utils.combine_grad_norm_groups)),
        (stage3, "mask_nan_or_inf_with_val_inplace", _mark),
        *((module, "is_invalid_grad_norm", _is_never_invalid) for module in (bf16_optimizer, stage_1_and_2, stage3)),
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
    """Return 1 for a norm that is not finite or is DeepSpeed's mark for that, -1, else 0, on its device."""
    return (~torch.isfinite(norm) | (norm < 0)).float()


def global_norm(input_tensors: list[Tensor], norm_type: float = 2, **_unused: Any) -> Tensor:
    """Return the norm of tensors, as BF16_Optimizer's function does, but in few kernels."""
    norms = torch.stack(torch._foreach_norm(input_tensors, norm_type))
    total: Tensor = norms.pow(norm_type).sum().pow(1.0 / norm_type)
    _mark(total)
    return total


def norm_of_shards(zero: Any, **_unused: Any) -> Tensor:
    """Return the norm of a sharded gradient at stages 1 and 2, infinite if it is not finite. Collective.

    DeepSpeed sends a message per group and launches kernels per tensor; here all groups share one message, and the
    tensors of a group one kernel. As in DeepSpeed, a rank sums squares in fp64.
    """
    squares = torch.zeros(len(zero.bit16_groups), device=zero.device)
    for group, square in enumerate(squares):
        part = [each for each in zero.averaged_gradients[group] if not getattr(each, "_zero_padding", False)]
        if part:
            square.copy_(torch.stack(torch._foreach_norm(part, 2, torch.float64)).square().sum())
    norm: Tensor = torch.linalg.vector_norm(sum_over_ranks(squares).sqrt())
    return norm.masked_fill(~torch.isfinite(norm), torch.inf)


def _is_never_invalid(_norm: Any) -> bool:
    """Return False: AdamW itself skips the update if the norm is not finite."""
    return False


def _mark(norm: Tensor, **_unused: Any) -> None:
    """Replace a norm that is not finite by -1 in place, without copying a constant to the device."""
    norm.masked_fill_(~torch.isfinite(norm), -1.0)
