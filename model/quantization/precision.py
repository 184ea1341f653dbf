"""Define the `precision` section: what a model rounds in its forward pass, in training and afterwards.

Precision scaling laws (arXiv 2411.04330) describe such models: P-bit integers in the forward pass only, with one scale
per output channel for weights, and one per tensor for activations, keys and values.
"""

from typing import Literal

from pydantic import BaseModel, ValidationInfo, field_validator
from pydantic import model_validator as validator
from torch import Tensor, nn

from plumbline.model.attention import ATTENTIONS, attention_kind
from plumbline.model.attention.kind import Attention
from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.skeleton import parameter_shapes
from plumbline.model.quantization.formats import parse_format
from plumbline.model.quantization.layers import QuantizedLinear, replace_linears
from plumbline.model.quantization.quantizer import Granularity, Quantizer, Site

PAPERS: dict[Site, Granularity] = {"weights": "channel", "activations": "tensor", "kv_cache": "tensor"}
BLOCK_FORMATS = {  # formats whose elements share a low-precision scale
    "mxfp8": Quantizer(format="e4m3", granularity="group", group_size=32, scales="e8m0"),
    "mxfp8_e5m2": Quantizer(format="e5m2", granularity="group", group_size=32, scales="e8m0"),
    "mxfp6": Quantizer(format="e2m3", granularity="group", group_size=32, scales="e8m0"),
    "mxfp6_e3m2": Quantizer(format="e3m2", granularity="group", group_size=32, scales="e8m0"),
    "mxfp4": Quantizer(format="e2m1", granularity="group", group_size=32, scales="e8m0"),
    "nvfp4": Quantizer(format="e2m1", granularity="group", group_size=16, scales="e4m3"),
}
PLAIN_BITS = 16  # bits of unrounded values, as precision laws count them
FLOAT8_MULTIPLE = 16  # both dimensions of a matrix must be multiples of this for a GPU's float8 units


class PrecisionConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure rounding in the forward pass of the blocks; embedding, head, norms and gradients are not rounded.

    Weights, activations and kv_cache take a number of bits P (integers), a format (e4m3, int8, ...), a block format
    (mxfp8, mxfp6, mxfp4, nvfp4), or a quantizer in full. Bits and formats use the granularity of arXiv 2411.04330.
    """

    weights: Quantizer | None = None
    """Weights of the linear layers. On its own, this is quantization-aware training."""
    activations: Quantizer | None = None
    """Inputs of the linear layers."""
    kv_cache: Quantizer | None = None
    """Keys and values, as a cache would store them."""
    float8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Alternatively, compute the blocks' matrix products in float8 in training, with a torchao recipe. Like bf16, this
    is a choice of arithmetic, not a property of the trained model."""
    float8_emulated: bool = False
    """Round to float8 and multiply in higher precision: slow, but works on any device, to try a configuration."""

    @field_validator("weights", "activations", "kv_cache", mode="before")
    @classmethod
    def _in_full(cls, value: object, info: ValidationInfo) -> object:
        site: Site = info.field_name  # type: ignore[assignment]
        is_name = isinstance(value, (int, str)) and not isinstance(value, bool)
        return named_quantizer(value, site) if is_name else value  # type: ignore[arg-type]

    @field_validator("weights", "activations", "kv_cache")
    @classmethod
    def _fits(cls, value: Quantizer | None, info: ValidationInfo) -> Quantizer | None:
        if value is not None:
            value.check(info.field_name)  # type: ignore[arg-type]
        return value

    @validator(mode="after")
    def _check(self) -> "PrecisionConfig":
        rounded = [site for site in ("weights", "activations") if getattr(self, site) is not None]
        if self.float8 is not None and rounded:
            raise ValueError(f"float8 = {self.float8} rounds weights and activations by itself: leave out {rounded[0]}")
        if self.float8_emulated and self.float8 is None:
            raise ValueError("float8_emulated = true: nothing is in float8; set float8, or leave it out")
        return self

    @property
    def is_plain(self) -> bool:
        """Return whether nothing is rounded."""
        return all(getattr(self, key) is None for key in ("weights", "activations", "kv_cache", "float8"))

    def bits(self, site: Site) -> int:
        """Return the bits of a value in training, `PLAIN_BITS` if it is not rounded."""
        quantizer: Quantizer | None = getattr(self, site)
        if quantizer is not None:
            return quantizer.numbers.bits
        return 8 if self.float8 is not None and site != "kv_cache" else PLAIN_BITS

    @property
    def training_bits(self) -> dict[str, int]:
        """Return the `bits` of all sites, under their names in precision laws."""
        names: dict[str, Site] = {"weight_bits": "weights", "activation_bits": "activations", "kv_bits": "kv_cache"}
        return {name: self.bits(site) for name, site in names.items()}

    @property
    def weight_format(self) -> str | None:
        """Return the number format of the weights in training, or None if they are not rounded."""
        if self.weights is not None:
            return self.weights.format
        return None if self.float8 is None else "e4m3"

    @property
    def group_size(self) -> int | None:
        """Return the number of weights that share a scale in training, or None if ungrouped or not rounded."""
        return None if self.weights is None else self.weights.group_size

    def __str__(self) -> str:
        """Describe the rounding in one line: weights int4 (channel), kv_cache int8 (tensor)."""
        sites = {site: getattr(self, site) for site in ("weights", "activations", "kv_cache")}
        words = [f"{site} {quantizer}" for site, quantizer in sites.items() if quantizer is not None]
        if self.float8 is not None:
            words.append(f"float8 products ({self.float8}{', emulated' if self.float8_emulated else ''})")
        return ", ".join(words) or "nothing rounded"


def named_quantizer(name: int | str, site: Site) -> Quantizer:
    """Return the quantizer for a number of bits, a format or a block format, at a site.

    Raises:
        ValueError: there is no such format.
    """
    if isinstance(name, str) and name in BLOCK_FORMATS:
        return BLOCK_FORMATS[name]
    known = name if isinstance(name, str) else f"int{name}"
    parse_format(known)  # its error is shorter than that of a quantizer inside a section
    return Quantizer(format=known, granularity=PAPERS[site])


def check_precision(precision: PrecisionConfig, model: ModelConfig) -> None:
    """Refuse precision settings that the blocks of a model do not support.

    Raises:
        ValueError: names the key and what would fit.
    """
    if precision.is_plain:
        return
    if precision.kv_cache is not None and not attention_kind(model).rounds_stored:
        stores = " or ".join(name for name, kind in ATTENTIONS.items() if kind.rounds_stored)
        raise ValueError(
            f"precision.kv_cache rounds the keys and values of model.attention: {stores}; it is {model.attention}, so "
            "leave kv_cache out"
        )
    matrices = parameter_shapes(model, roles=("hidden_matrix",))
    rows = {name: shape[1] for name, shape in matrices.items()}
    heads = {"model.head_dim": model.head_dim}
    for site, lengths in (("weights", rows), ("activations", rows), ("kv_cache", heads)):
        quantizer: Quantizer | None = getattr(precision, site)
        size = None if quantizer is None else quantizer.group_size
        for name, length in lengths.items():
            if size is not None and length % size:
                raise ValueError(
                    f"precision.{site}: groups of {size} do not divide the {length} values of a row of {name}: choose "
                    "a group_size that does, or another granularity"
                )
    for name, shape in matrices.items():
        if precision.float8 is not None and any(side % FLOAT8_MULTIPLE for side in shape):
            raise ValueError(
                f"precision.float8 = {precision.float8}: {name} is {shape[0]} x {shape[1]}, and float8 units need "
                f"multiples of {FLOAT8_MULTIPLE}: change the widths of the model section"
            )


def apply_precision(blocks: nn.Module, precision: PrecisionConfig) -> None:
    """Apply `precision` to blocks in place, except float8 (see float8.py); parameters keep their names."""
    weights, activations, kv_cache = precision.weights, precision.activations, precision.kv_cache
    if weights is not None or activations is not None:
        replace_linears(blocks, lambda _, linear: QuantizedLinear(linear, weights, activations))
    if kv_cache is not None:
        for module in blocks.modules():
            if isinstance(module, Attention):
                module.as_stored = StoredRounded(kv_cache, kv_cache)


def scales_over_tokens(blocks: nn.Module) -> list[str]:
    """Describe the quantizers in blocks whose rounding of a token depends on other tokens."""
    found = dict[str, None]()
    for module in blocks.modules():
        if isinstance(module, QuantizedLinear) and module.activations is not None and module.limits is None:
            found |= (
                {f"activations {module.activations}": None} if module.activations.spans_tokens("activations") else {}
            )
        stored = getattr(module, "as_stored", None)
        for quantizer in (stored.keys, stored.values) if isinstance(stored, StoredRounded) else ():
            found |= {f"kv_cache {quantizer}": None} if quantizer and quantizer.spans_tokens("kv_cache") else {}
    return list(found)


class StoredRounded:
    """Round keys and values [B, heads, tokens, head_dim] as a cache would store them."""

    def __init__(self, keys: Quantizer | None, values: Quantizer | None) -> None:
        self.keys, self.values = keys, values
        for quantizer in (keys, values):
            if quantizer is not None:
                quantizer.check("kv_cache")

    def __call__(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, each rounded if it has a quantizer."""
        keys = keys if self.keys is None else self.keys.fake_quantize(keys, "kv_cache")
        return keys, values if self.values is None else self.values.fake_quantize(values, "kv_cache")
