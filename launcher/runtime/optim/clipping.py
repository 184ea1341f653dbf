"""Limit the gradient by its plain norm, or by the norm that it would have at the base size.

Under muP and CompleteP the gradients of hidden matrices keep their norm as a model grows wider, while those of the
embedding, the unembedding and the norms shrink as m_N^-1/2; over depth, those of all blocks together change as
m_L^(1/2 - alpha) (`gradient_growth` of the parameterization's table). So a limit on the plain norm that was tuned at
the base clips differently at scale. The base-equivalent norm first divides each group's norm by its growth. Either way
the whole gradient is multiplied by one factor, so its direction is unchanged.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from plumbline.launcher.runtime.optim.optimizer import OptimizerConfig


def base_equivalent_norm(norms: Sequence[Tensor], groups: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the norm that the gradient would have at the base size, given each group's norm, a scalar."""
    pairs = zip(norms, groups, strict=True)
    at_base = torch.stack([norm / group["gradient_growth"] for norm, group in pairs])
    return cast(Tensor, torch.linalg.vector_norm(at_base))


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that limits a gradient of this norm, at most 1, a scalar, as torch's clip_grad_norm_ does."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def clip_gradients(model: nn.Module, groups: Sequence[Mapping[str, Any]], optimizer: OptimizerConfig) -> Tensor:
    """Clip the gradients of whole parameters in place, and return the norm that was limited, a scalar.

    Args:
        model: the model with the gradients.
        groups: the optimizer's groups, which contain every trained parameter.
        optimizer: the section that says which norm is limited, and to what.
    """
    limit = optimizer.grad_clip or math.inf
    if optimizer.grad_clip_norm == "plain":
        return clip_grad_norm_(model.parameters(), limit)
    norms = [get_total_norm([p.grad for p in group["params"] if p.grad is not None]) for group in groups]
    norm = base_equivalent_norm(norms, groups)
    clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm
