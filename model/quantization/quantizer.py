"""Round a tensor to a number format: choose which values share a scale, and compute that scale.

A tensor is viewed as blocks of values that share a scale; `blocked` returns the view and the dimensions that a block
spans. A `Grid` holds the scale of each block and rounds to it; `Quantizer.fake_quantize` does both, in ordinary
floating point.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, PositiveInt, field_validator
from pydantic import model_validator as validator
from torch import Tensor

from plumbline.model.quantization.formats import Float, Format, parse_format, power_of_two

Site = Literal["weights", "activations", "kv_cache"]
Granularity = Literal["tensor", "channel", "token", "head", "group"]

# The dimensions along which scales differ. Weights are [out, in], activations [..., tokens, channels], keys and values
# [B, heads, tokens, head_dim]
OWN_SCALE: dict[Site, dict[Granularity, tuple[int, ...]]] = {
    "weights": {"tensor": (), "channel": (-2,)},
    "activations": {"tensor": (), "channel": (-1,), "token": (-4, -3, -2)},
    "kv_cache": {"tensor": (), "head": (-3,), "channel": (-3, -1), "token": (-4, -3, -2)},
}
SCALES = {"fp32": 32, "fp16": 16, "e8m0": 8, "e4m3": 8}  # bits of a stored scale
SHRINKS = torch.linspace(1.0, 0.3, 71).tolist()[1:]  # shares of the range to try if it is chosen by squared error
FP16_NEAREST = 8
"""Bits up to which the nearest fp16 scale will do: it clips an eighth of a step, and of 2^16 codes it would clip 19."""
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Limits:
    """Hold the lowest and highest value that each block must represent, broadcastable against the blocked view."""

    low: Tensor
    high: Tensor

    @property
    def largest(self) -> Tensor:
        """Return the largest magnitude of all blocks, a scalar."""
        return torch.maximum(self.low.abs().amax(), self.high.abs().amax())

    def widened(self, other: "Limits") -> "Limits":
        """Return limits that cover both."""
        return Limits(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))

    def moved(self, other: "Limits", share: float) -> "Limits":
        """Return limits moved by `share` of the way to others."""
        return Limits(self.low.lerp(other.low, share), self.high.lerp(other.high, share))

    def shrunk(self, share: float) -> "Limits":
        """Return limits with both ends multiplied by `share`."""
        return Limits(self.low * share, self.high * share)


@dataclass(frozen=True)
class Grid:
    """Round to the values that each block of a view can take: a format times a scale, around a zero point."""

    format: Format
    scale: Tensor
    """Broadcastable against the view, fp32."""
    zero: Tensor | None = None
    """The code of the value 0 in an asymmetric integer grid, from 0 to 2^bits - 1."""

    def codes(self, view: Tensor) -> Tensor:
        """Return the values to store, in fp32: values of the format, or 0 to 2^bits - 1 for an asymmetric grid."""
        scaled = view.float() / self.scale
        if self.zero is None:
            return self.format.round(scaled)
        return (scaled.round() + self.zero).clamp(0, 2**self.format.bits - 1)

    def values(self, codes: Tensor) -> Tensor:
        """Return the values that the codes stand for, in fp32."""
        return (codes if self.zero is None else codes - self.zero) * self.scale

    def round(self, view: Tensor) -> Tensor:
        """Return the nearest values of the grid, in the view's dtype."""
        return self.values(self.codes(view)).to(view.dtype)

    @property
    def limits(self) -> Limits:
        """Return the lowest and the highest value of the grid."""
        if self.zero is None:
            return Limits(self.format.smallest * self.scale, self.format.largest * self.scale)
        return Limits(-self.zero * self.scale, (2**self.format.bits - 1 - self.zero) * self.scale)


class Quantizer(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure how the values of one kind of tensor are rounded."""

    format: str
    """int2 to int16, or a float: e4m3, e5m2, e2m1, ... (eXmY)."""
    granularity: Granularity = "tensor"
    """Which values share a scale: those of a tensor, of a channel (for weights, an output channel), of a token, of a
    head (keys and values), or group_size neighbours along the last dimension."""
    group_size: PositiveInt | None = None
    """Values of a group; for granularity group."""
    symmetric: bool = True
    """Whether the grid is symmetric around zero; only values that a range or static limits clip may take the code
    -2^(bits - 1) as well. False: from the smallest value to the largest (integers only)."""
    full_range: bool = False
    """For symmetric integers: use the smallest step with which the codes, including -2^(bits - 1), cover all values.
    False: a step of absmax / (2^(bits - 1) - 1), as in arXiv 2411.04330."""
    range: Literal["absmax", "percentile", "mse"] = "absmax"
    """What the grid covers: all values, the given percentile of them, or the range with the least squared error."""
    percentile: float = Field(default=99.999, gt=50.0, lt=100.0)
    """Percentile for range percentile, in percent of the values of a block."""
    scales: Literal["fp32", "fp16", "e8m0", "e4m3"] = "fp32"
    """Format of the scales. e8m0: powers of two, as in microscaling formats; e4m3: each relative to one fp32 scale of
    the whole tensor, as in NVFP4."""

    @field_validator("format")
    @classmethod
    def _known(cls, name: str) -> str:
        parse_format(name)
        return name

    @validator(mode="after")
    def _check(self) -> "Quantizer":
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError(
                f"granularity = {self.granularity}, group_size = {self.group_size}: a size belongs to groups, and only "
                "to them"
            )
        if not self.symmetric and isinstance(self.numbers, Float):
            raise ValueError(f"symmetric = false, format = {self.format}: only integers have a zero point")
        if not self.symmetric and self.scales == "e8m0":
            raise ValueError(
                "symmetric = false, scales = e8m0: powers of two have no zero point; take fp16 or fp32 scales"
            )
        if self.full_range and (not self.symmetric or isinstance(self.numbers, Float)):
            raise ValueError(f"full_range = true, format = {self.format}: it is about symmetric integers")
        if self.range != "percentile" and self.percentile != type(self).model_fields["percentile"].default:
            raise ValueError(
                f"percentile = {self.percentile:g}, range = {self.range}: only range = percentile reads it; set that, "
                "or leave percentile out"
            )
        return self

    @property
    def numbers(self) -> Format:
        """Return the number format."""
        return parse_format(self.format)

    def check(self, site: Site) -> None:
        """Refuse granularities that do not apply to such tensors.

        Raises:
            ValueError: names those that do.
        """
        known = (*OWN_SCALE[site], "group")
        if self.granularity not in known:
            raise ValueError(f"granularity = {self.granularity}: {site} have {', '.join(known)}")

    def spans_tokens(self, site: Site) -> bool:
        """Return whether the rounding of a token depends on other tokens because they share a scale.

        Scales in e4m3 always do, since they are relative to the largest scale of the whole tensor.
        """
        return self.scales == "e4m3" or (self.group_size is None and -2 not in OWN_SCALE[site][self.granularity])

    def fake_quantize(self, x: Tensor, site: Site, limits: Limits | None = None) -> Tensor:
        """Round x to the grid, with the same shape and dtype; the gradient is 0 where limits or a range clip x.

        Elsewhere it passes, even where a scale in e8m0 or e4m3 was rounded to less than the values require.

        Args:
            x: a tensor with the site's shape (OWN_SCALE) and any float dtype; computed in fp32.
            site: what x is.
            limits: static limits, measured before; None uses those of x itself (dynamic).
        """
        return _StraightThrough.apply(x, self, site, limits)  # type: ignore[no-untyped-call, no-any-return]

    def blocked(self, x: Tensor, site: Site) -> tuple[Tensor, tuple[int, ...]]:
        """Return x as fp32 blocks, and the dimensions that a block spans.

        Raises:
            ValueError: the last dimension is not a multiple of the group size.
        """
        if self.group_size is not None:
            if x.size(-1) % self.group_size:
                raise ValueError(f"group_size = {self.group_size} does not divide the {x.size(-1)} values of a row")
            return x.float().unflatten(-1, (-1, self.group_size)), (-1,)
        own = {x.dim() + dim for dim in OWN_SCALE[site][self.granularity]}
        return x.float(), tuple(dim for dim in range(x.dim()) if dim not in own)

    def limits(self, x: Tensor, site: Site) -> Limits:
        """Return the limits that the grid for x must cover: all of each block, or the percentile of it."""
        return self._reach(*self.blocked(x, site))

    def grid(self, x: Tensor, site: Site, limits: Limits | None = None) -> Grid:
        """Return the grid for x, for its `blocked` view."""
        view, dims = self.blocked(x, site)
        if limits is not None:
            return self.grid_between(limits, limits.largest)
        reach = self._reach(view, dims)
        if self.range != "mse":
            return self.grid_between(reach, reach.largest)
        return self.search(view, reach, lambda missed: missed.square().sum(dims, keepdim=True), SHRINKS)

    def search(self, view: Tensor, limits: Limits, error: Callable[[Tensor], Tensor], shares: Sequence[float]) -> Grid:
        """Return, for each block, the grid of least error among those that cover a share of its limits.

        Args:
            view: as returned by `blocked`.
            limits: of each block.
            error: differences to the view -> the error of each block.
            shares: shares to try besides the whole, at most 1.
        """
        best = self.grid_between(limits, limits.largest)
        least = error(best.round(view) - view)
        for share in shares:
            grid = self.grid_between(limits.shrunk(share), limits.largest)
            errors = error(grid.round(view) - view)
            better = errors < least
            least = torch.where(better, errors, least)
            scale = torch.where(better, grid.scale, best.scale)
            zero = None if best.zero is None or grid.zero is None else torch.where(better, grid.zero, best.zero)
            best = Grid(self.numbers, scale, zero)
        return best

    def grid_between(self, limits: Limits, largest: Tensor) -> Grid:
        """Return the grid that covers the limits of each block.

        Args:
            limits: of each block.
            largest: largest magnitude in the whole tensor, to which e4m3 scales are relative.
        """
        numbers = self.numbers
        if self.symmetric:
            reach = torch.maximum(limits.low.abs(), limits.high.abs())
            if self.full_range:
                reach = torch.maximum(limits.high, limits.low * (numbers.largest / numbers.smallest))
            return Grid(numbers, self._scale(reach, numbers, largest))
        # Zero must be on the grid, so that padded or pruned values stay zero
        low, high = limits.low.clamp_max(0.0), limits.high.clamp_min(0.0)
        codes = 2**numbers.bits - 1
        scale = self._stored((high - low) / codes, 2 * largest / codes)  # no block spans more than from -largest to it
        # A scale that lost bits may be too small for both ends: then the lower one gives way
        return Grid(numbers, scale, (-low / scale).round().clamp_max(codes))

    def _scale(self, reach: Tensor, numbers: Format, largest: Tensor) -> Tensor:
        if self.scales == "e8m0":
            # OCP MX v1.0, section 6.3: the exponent of the largest value minus that of the format's largest
            top = numbers.largest_exponent if isinstance(numbers, Float) else numbers.bits - 2
            exponent = torch.frexp(reach.clamp_min(TINY)).exponent - 1 - top
            return power_of_two(exponent.clamp(-126, 127))
        return self._stored(reach / numbers.largest, largest / numbers.largest)

    def _stored(self, scale: Tensor, largest_scale: Tensor) -> Tensor:
        """Return the scale as stored, which is positive even for blocks of zeros."""
        if self.scales == "fp16":
            half = torch.finfo(torch.float16)
            if self.numbers.bits <= FP16_NEAREST:
                # Rounded up if subnormal, since its few bits could otherwise clip the largest value
                subnormal = (scale * 2.0**24).ceil().clamp_min(1.0) / 2.0**24
                return torch.where(scale < half.tiny, subnormal, scale.clamp_max(half.max).half().float())
            unit = power_of_two((torch.frexp(scale.clamp_min(2.0**-24)).exponent - 11).clamp_min(-24))
            return ((scale / unit).ceil().clamp_min(1.0) * unit).clamp_max(half.max)
        if self.scales == "e4m3":
            e4m3 = Float(4, 3)
            whole = (largest_scale / e4m3.largest).clamp_min(TINY)
            return e4m3.round((scale / whole).clamp_min(2.0**-9)) * whole  # 2^-9: the least that is not zero
        return scale.clamp_min(TINY)

    def _reach(self, view: Tensor, dims: tuple[int, ...]) -> Limits:
        """Return the limits of each block, from the whole block or a percentile of it."""
        if self.range != "percentile":
            return Limits(view.amin(dims, keepdim=True), view.amax(dims, keepdim=True))
        shape = view.amax(dims, keepdim=True).shape
        rows = view.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))  # a block is a row
        if self.symmetric:
            high = _quantile(rows.abs(), self.percentile / 100).view(shape)
            return Limits(-high, high)
        low, high = (_quantile(rows, share / 100).view(shape) for share in (100 - self.percentile, self.percentile))
        return Limits(low, high)

    def __str__(self) -> str:
        """Describe the quantizer briefly: int4 (channel), e2m1 (group of 32, e8m0 scales)."""
        shared = self.granularity if self.group_size is None else f"group of {self.group_size}"
        scales = "" if self.scales == "fp32" else f", {self.scales} scales"
        return f"{self.format} ({shared}{scales})"

    def stored_bits(self, shape: Sequence[int]) -> float:
        """Return the bits per value of a weight [out, in]: its code, and its share of scales and zero points."""
        out, width = shape
        blocks = {"tensor": 1, "channel": out, "group": out * width // (self.group_size or 1)}[self.granularity]
        bits = blocks * (SCALES[self.scales] + (0 if self.symmetric else self.numbers.bits))
        bits += 32 if self.scales == "e4m3" else 0
        return self.numbers.bits + bits / (out * width)


def _quantile(rows: Tensor, share: float) -> Tensor:
    """Return the quantile along the last dimension, which may be longer than torch.quantile supports.

    It sorts, since `kthvalue` is not deterministic on GPUs.
    """
    position = max(1, min(rows.size(-1), round(share * (rows.size(-1) - 1)) + 1))
    return rows.sort(-1).values[..., position - 1]


class _StraightThrough(torch.autograd.Function):
    """Round in the forward pass; in the backward pass, use the gradient of clamping to the grid's range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, site: Site, limits: Limits | None) -> Tensor:
        view, _ = quantizer.blocked(x, site)
        grid = quantizer.grid(x, site, limits)
        rounded = grid.round(view).reshape(x.shape).to(x.dtype)
        clips = limits is not None or quantizer.range != "absmax"
        if clips:
            # Values up to half a step beyond the last one still round to it
            ends = grid.limits
            within = (view >= ends.low - grid.scale / 2) & (view <= ends.high + grid.scale / 2)
            ctx.save_for_backward(within.reshape(x.shape))
        ctx.clips = clips
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.clips:
            (within,) = ctx.saved_tensors
            gradient = gradient * within
        return gradient, None, None, None
