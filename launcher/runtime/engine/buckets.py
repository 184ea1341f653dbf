"""Say how large the messages are in which DeepSpeed sums gradients and gathers weights."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from plumbline.launcher.runtime.config.schema import Config
from plumbline.model.parameterization.table import parameter_shapes

LEAST_BUCKET = 2**24
"""Elements under which messages are too small for the network, 64 MiB in fp32."""


@dataclass(frozen=True)
class Buckets:
    """Hold the elements of one message."""

    reduce: int
    gather: int
    prefetch: int


def buckets(config: Config, trained: int, stage: int) -> Buckets:
    """Return the sizes for a model with `trained` parameters that are trained, at a ZeRO stage."""
    shapes = parameter_shapes(config.model, config.objective)
    block = max(largest_block(shapes), LEAST_BUCKET)
    bucket = config.deepspeed.bucket_size or block
    # At stage 2 DeepSpeed 0.19.8 sums a gradient that fits into no bucket where it lies, beside the backward pass, and
    # frees it before that is done, on ranks that hold no part of it: the next tensor of the backward pass may lie there
    whole = largest_tensor(shapes) if stage == 2 else 0
    # DeepSpeed allocates all of the first in every step. A block is gathered while the one before computes
    return Buckets(reduce=min(max(bucket, whole), trained), gather=bucket, prefetch=block)


def sends_gradients(config: Config, ranks: int) -> bool:
    """Return whether gradients of stage 1 in fp32 are copied: for other ranks, for the host, or to be rounded."""
    settings = config.deepspeed
    return ranks > 1 or settings.offload_optimizer or settings.communication_dtype == "bf16"


def largest_block(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the elements of the largest block of the stack, made even."""
    elements = Counter[str]()
    for name, shape in shapes.items():
        if found := re.match(r"model\.layers\.\d+\.", name):
            elements[found[0]] += math.prod(shape)
    return _made_even(max(elements.values()))


def largest_tensor(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the elements of the largest tensor, made even."""
    return _made_even(max(math.prod(shape) for shape in shapes.values()))


def _made_even(elements: int) -> int:
    """Return a number, or one more where it is odd: DeepSpeed asks for an even one."""
    return elements + elements % 2
