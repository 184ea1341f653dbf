"""Rotate queries and keys by position (Su et al., arXiv 2104.09864), in Hugging Face's half-split layout."""

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines for integer `positions` [B or 1, T], fp32 [B or 1, 1, T, head_dim] each.

    Computed in fp32 at every forward and never stored as a buffer: a buffer would be rounded when the model is cast
    to bf16, and bf16 wavelengths are wrong by up to a whole turn at long range.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, T, head_dim] by the tables of `rotary_tables`, in x's dtype.

    The sign of the rotation is in the table, so the halves only trade places: a single copy, forward and backward.
    """
    halves = x.view(*x.shape[:-1], 2, -1)  # splitting the last dimension needs no copy, whatever the strides
    swapped = halves.flip(-2).flatten(-2)
    return x * cos + swapped * sin
