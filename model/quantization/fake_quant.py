"""Fake quantization: values rounded to a grid of integers and scaled back, computed in ordinary floating point."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fake_quantize(x: Tensor, bits: int) -> Tensor:
    """Round x to the nearest of 2^bits - 1 levels, evenly spaced from -max |x| to max |x|; same shape and dtype.

    Symmetric absmax with one scale for the whole tensor: the coarsest scheme, and the one that outliers hurt most.

    Raises:
        ValueError: fewer than 2 bits have no level beside zero.
    """
    if bits < 2:
        raise ValueError(f"bits = {bits}: a symmetric grid needs at least 2 bits")
    levels = 2 ** (bits - 1) - 1
    wide = x.float()
    scale = (wide.abs().amax() / levels).clamp_min(torch.finfo(torch.float32).tiny)  # tiny: of a tensor of zeros
    rounded: Tensor = (wide / scale).round() * scale
    return rounded.to(x.dtype)


@contextmanager
def quantized_linears(layers: nn.Module, weight_bits: int, input_bits: int) -> Iterator[None]:
    """Make every nn.Linear inside `layers` compute with quantized weight and input until the block ends.

    Quantization happens inside forward, where ZeRO-3 has gathered the weight; the weights themselves are not touched.
    Compiled modules run uncompiled meanwhile.
    """
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.__dict__["forward"] = partial(_quantized_forward, linear, weight_bits, input_bits)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for linear in linears:
            del linear.__dict__["forward"]  # the class's own shows again


def _quantized_forward(linear: nn.Linear, weight_bits: int, input_bits: int, x: Tensor) -> Tensor:
    return F.linear(fake_quantize(x, input_bits), fake_quantize(linear.weight, weight_bits), linear.bias)
