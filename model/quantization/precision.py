"""The `precision` section: what a model rounds in its forward pass while it trains, and whenever it runs afterwards.

Laws of precision (arXiv 2411.04330) are about such models: integers of P bits, forward only, weights with a scale for
each output channel, activations and keys and values with one for each tensor.
"""

from pydantic import BaseModel, ValidationInfo, field_validator
from torch import Tensor, nn

from model.attention.softmax import SoftmaxAttention
from model.quantization.layers import QuantizedLinear, replace_linears
from model.quantization.quantizer import Granularity, Quantizer, Site

PAPERS: dict[Site, Granularity] = {"weights": "channel", "activations": "tensor", "kv_cache": "tensor"}
BLOCK_FORMATS = {  # elements that share a scale of few bits
    "mxfp8": Quantizer(format="e4m3", granularity="group", group_size=32, scales="e8m0"),
    "mxfp8_e5m2": Quantizer(format="e5m2", granularity="group", group_size=32, scales="e8m0"),
    "mxfp6": Quantizer(format="e2m3", granularity="group", group_size=32, scales="e8m0"),
    "mxfp6_e3m2": Quantizer(format="e3m2", granularity="group", group_size=32, scales="e8m0"),
    "mxfp4": Quantizer(format="e2m1", granularity="group", group_size=32, scales="e8m0"),
    "nvfp4": Quantizer(format="e2m1", granularity="group", group_size=16, scales="e4m3"),
}


class PrecisionConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Rounding in the forward pass of the blocks; embedding, head, norms and gradients stay as they are.

    Each is a number of bits P (integers), a format (e4m3, int8, ...), a block format (mxfp8, mxfp6, mxfp4, nvfp4), or a
    quantizer in full. Bits and formats have the granularity of arXiv 2411.04330.
    """

    weights: Quantizer | None = None
    """Weights of the linear layers. Alone, this is what is called quantization-aware training."""
    activations: Quantizer | None = None
    """Inputs of the linear layers."""
    kv_cache: Quantizer | None = None
    """Keys and values, as a cache would store them."""

    @field_validator("weights", "activations", "kv_cache", mode="before")
    @classmethod
    def _in_full(cls, value: object, info: ValidationInfo) -> object:
        site: Site = info.field_name  # type: ignore[assignment]
        return named_quantizer(value, site) if isinstance(value, (int, str)) else value

    @field_validator("weights", "activations", "kv_cache")
    @classmethod
    def _fits(cls, value: Quantizer | None, info: ValidationInfo) -> Quantizer | None:
        if value is not None:
            value.check(info.field_name)  # type: ignore[arg-type]
        return value

    @property
    def is_plain(self) -> bool:
        """Whether nothing is rounded."""
        return self.weights is None and self.activations is None and self.kv_cache is None


def named_quantizer(name: int | str, site: Site) -> Quantizer:
    """The quantizer that a number of bits, a format or a block format stands for, at a site.

    Raises:
        ValueError: there is no such format.
    """
    if isinstance(name, str) and name in BLOCK_FORMATS:
        return BLOCK_FORMATS[name]
    return Quantizer(format=name if isinstance(name, str) else f"int{name}", granularity=PAPERS[site])


def apply_precision(blocks: nn.Module, precision: PrecisionConfig) -> None:
    """Make blocks compute as `precision` says, in place; names of parameters stay."""
    weights, activations, kv_cache = precision.weights, precision.activations, precision.kv_cache
    if weights is not None or activations is not None:
        replace_linears(blocks, lambda _, linear: QuantizedLinear(linear, weights, activations))
    if kv_cache is not None:
        for module in blocks.modules():
            if isinstance(module, SoftmaxAttention):
                module.as_stored = StoredRounded(kv_cache, kv_cache)


class StoredRounded:
    """What becomes of keys and values [B, heads, tokens, head_dim] when a cache stores them."""

    def __init__(self, keys: Quantizer | None, values: Quantizer | None) -> None:
        self.keys, self.values = keys, values
        for quantizer in (keys, values):
            if quantizer is not None:
                quantizer.check("kv_cache")

    def __call__(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Both rounded; what has no quantizer stays."""
        keys = keys if self.keys is None else self.keys.fake_quantize(keys, "kv_cache")
        return keys, values if self.values is None else self.values.fake_quantize(values, "kv_cache")
