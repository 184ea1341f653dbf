"""Rotary position embedding (Su et al., arXiv 2104.09864) in Hugging Face's half-split layout."""

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for integer `positions` [B or 1, T]; each result is [B or 1, 1, T, head_dim], fp32.

    Computed in fp32 at every forward and never stored as a buffer: a buffer would be rounded when the model is cast
    to bf16, and bf16 wavelengths are wrong by up to a whole turn at long range.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, T, head_dim] by the tables of `rotary_tables`, in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos + rotated * sin
