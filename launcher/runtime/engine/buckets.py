"""Choose the sizes of the messages in which DeepSpeed sums gradients and gathers weights."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from plumbline.launcher.runtime.config.schema import Config
from plumbline.model.parameterization.skeleton import parameter_shapes

LEAST_BUCKET = 2**24
"""Elements below which a message is inefficient on the network, 64 MiB in fp32."""


@dataclass(frozen=True)
class Buckets:
    """Hold the number of elements of each kind of message."""

    reduce: int
    gather: int
    prefetch: int


def buckets(config: Config, trained: int, stage: int) -> Buckets:
    """Return the sizes for a model with `trained` trained parameters at a ZeRO stage."""
    shapes = parameter_shapes(config.model, config.objective)
    block = max(largest_block(shapes), LEAST_BUCKET)
    bucket = config.deepspeed.bucket_size or block
    # At stage 2 DeepSpeed 0.19.8 sums a gradient larger than a bucket in place, overlapped with the backward pass. On
    # ranks that hold no part of it, it frees the gradient before the sum is done, so its memory may be reused
    whole = largest_tensor(shapes) if stage == 2 else 0
    # DeepSpeed allocates the whole reduce bucket in every step. A block is gathered while the one before computes
    return Buckets(reduce=min(max(bucket, whole), trained), gather=bucket, prefetch=block)


def sends_gradients(config: Config, ranks: int) -> bool:
    """Return whether stage 1 in fp32 copies gradients into buckets: for other ranks, the host, or rounding."""
    settings = config.deepspeed
    return ranks > 1 or settings.offload_optimizer or settings.communication_dtype == "bf16"


def sums_shares(config: Config, stage: int) -> bool:
    """Return whether a ZeRO stage sums gradients as engine/gradient_shares.py does, each rank receiving its share."""
    return stage == 1 and config.deepspeed.precision == "bf16" and not config.deepspeed.offload_optimizer


def largest_block(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of elements of the largest block of the stack, made even."""
    elements = Counter[str]()
    for name, shape in shapes.items():
        if found := re.match(r"model\.layers\.\d+\.", name):
            elements[found[0]] += math.prod(shape)
    return _made_even(max(elements.values()))


def largest_tensor(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of elements of the largest tensor, made even."""
    return _made_even(max(math.prod(shape) for shape in shapes.values()))


def _made_even(elements: int) -> int:
    """Return a number rounded up to an even one, as DeepSpeed requires."""
    return elements + elements % 2
