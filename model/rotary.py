"""Rotate queries and keys by position (Su et al., arXiv 2104.09864), in Hugging Face's half-split layout."""

import torch
from torch import Tensor

from plumbline.model.rotary_scaling import RopeScaling


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines for integer `positions` [B or 1, T], fp32 [B or 1, 1, T, head_dim] each.

    They are computed in fp32 in every forward pass and never stored as a buffer, which would be rounded when the model
    is cast to bf16: bf16 wavelengths are off by up to a whole turn at long range.
    """
    frequencies, magnitude = rotary_frequencies(head_dim, theta, scaling, positions.device)
    angles = positions[:, None, :, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> tuple[Tensor, float]:
    """Return the radians per token of each pair, fp32 [head_dim / 2], and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = theta**-exponents
    return (frequencies, 1.0) if scaling is None else (scaling.stretch(frequencies, theta), scaling.magnitude)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, T, head_dim] by the tables of `rotary_tables`, in x's dtype.

    The sign of the rotation is in the table, so the halves only swap: a single copy, forward and backward.
    """
    halves = x.view(*x.shape[:-1], 2, -1)  # splitting the last dimension never needs a copy
    swapped = halves.flip(-2).flatten(-2)
    return x * cos + swapped * sin
