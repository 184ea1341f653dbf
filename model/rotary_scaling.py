"""Stretch rotary positions beyond the training length with the rules linear, Llama 3 and YaRN.

Each rule changes the frequencies of `rotary.py`. Keys are those of transformers' `rope_parameters`, so stock
configurations are imported and exported unchanged.
"""

import math
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt
from pydantic import model_validator as validator
from torch import Tensor


class LinearScaling(BaseModel, extra="forbid", frozen=True, strict=True):
    """Divide every frequency (position interpolation, arXiv 2306.15595)."""

    rope_type: Literal["linear"]
    """Which rule."""
    factor: float = Field(ge=1.0)
    """Divisor of the frequencies: how many times longer sequences become."""

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:  # noqa: ARG002 - of all rules alike
        """Scale the frequencies [head_dim / 2], in radians per token, which are powers of the base `theta`."""
        return frequencies / self.factor

    @property
    def magnitude(self) -> float:
        """Return the factor on cosines and sines."""
        return 1.0


class Llama3Scaling(BaseModel, extra="forbid", frozen=True, strict=True):
    """Divide low frequencies and keep high ones, with a smooth transition (Llama 3.1)."""

    rope_type: Literal["llama3"]
    """Which rule."""
    factor: float = Field(ge=1.0)
    """Divisor of low frequencies."""
    low_freq_factor: PositiveFloat
    """Frequencies with fewer turns than this in the original length are low."""
    high_freq_factor: PositiveFloat
    """Frequencies with more turns than this in the original length are high."""
    original_max_position_embeddings: PositiveInt
    """Longest sequence before the scaling, in tokens."""

    @validator(mode="after")
    def _check(self) -> "Llama3Scaling":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor} must be above low_freq_factor = {self.low_freq_factor}"
            )
        return self

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:  # noqa: ARG002 - of all rules alike
        """Scale the frequencies [head_dim / 2], in radians per token, which are powers of the base `theta`."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = share.clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies

    @property
    def magnitude(self) -> float:
        """Return the factor on cosines and sines."""
        return 1.0


class YarnScaling(BaseModel, extra="forbid", frozen=True, strict=True):
    """Divide low frequencies and keep high ones, with a ramp over dimensions in between, and sharpen attention (YaRN).

    arXiv 2309.00071, sections 3.2 to 3.4.
    """

    rope_type: Literal["yarn"]
    """Which rule."""
    factor: float = Field(ge=1.0)
    """Divisor of low frequencies."""
    original_max_position_embeddings: PositiveInt
    """Longest sequence before the scaling, in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Turns in the original length at and above which a frequency is kept."""
    beta_slow: PositiveFloat = 1.0
    """Turns in the original length up to which a frequency is divided by the whole factor."""
    attention_factor: PositiveFloat | None = None
    """Factor on cosines and sines. None: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Let the ramp begin and end at whole dimensions."""

    @validator(mode="after")
    def _check(self) -> "YarnScaling":
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast} must not be below beta_slow = {self.beta_slow}")
        return self

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scale the frequencies [head_dim / 2], in radians per token, which are powers of the base `theta`."""
        half = len(frequencies)
        first, last = (self._dimension(turns, half, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        places = torch.arange(half, dtype=torch.float32, device=frequencies.device)
        # If the original length is so large that the ramp begins after the last dimension, it runs backwards, as in
        # transformers, whose numbers an export must match
        divided = ((places - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies / self.factor * divided + frequencies * (1 - divided)

    def _dimension(self, turns: float, half: int, theta: float) -> float:
        """Return which of `half` dimensions has `turns` turns in the original length."""
        return half * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    @property
    def magnitude(self) -> float:
        """Return the factor on cosines and sines."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
RULES: dict[str, type[LinearScaling] | type[Llama3Scaling] | type[YarnScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
UNSCALED = {"rope_theta", "partial_rotary_factor"}
"""Keys of rope_parameters that are not about scaling."""


def scaling_of(rope_parameters: dict[str, Any]) -> dict[str, Any] | None:
    """Return the value of model.rope_scaling that is equivalent to a stock configuration's rope_parameters.

    Raises:
        ValueError: the rule or one of its keys is unknown to this decoder.
    """
    name = rope_parameters["rope_type"]
    if name == "default":
        return None
    if name not in RULES:
        raise ValueError(f"rope_type = {name}: this decoder has plain rotary positions, {', '.join(RULES)}")
    rule = RULES[name]
    given = {key: value for key, value in rope_parameters.items() if key not in UNSCALED and value is not None}
    if unknown := sorted(given.keys() - rule.model_fields.keys()):
        raise ValueError(f"rope_parameters: {', '.join(unknown)} of rope_type {name} are not known to this decoder")
    return rule.model_validate(given).model_dump()
