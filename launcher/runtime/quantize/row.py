"""Hold the effect of one recipe on one checkpoint: a line of rows.jsonl."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plumbline.launcher.runtime.quantize.damage import Damage
from plumbline.launcher.runtime.quantize.facts import CheckpointFacts
from plumbline.launcher.runtime.system.files import finite, from_keys

NEVER_NONE = ("base_loss", "loss", "delta", "perplexity", "kl", "agreement")
"""Fields of `Damage` for which null in a file means not finite."""


@dataclass(frozen=True)
class TextSettings:
    """State on which text a row is measured, and how it is cut."""

    data: str
    data_fingerprint: str
    sequence_length: int
    """Tokens per window."""
    batch_size: int
    """Windows per forward pass; tensor-wise scales are per batch."""
    max_batches: int | None
    """Most batches to score, or None for the whole held-out split."""
    calibration_sequences: int

    @property
    def as_named(self) -> tuple[Any, ...]:
        """Return what a user asks for: the text by its name, whatever it holds by now, and how it is cut."""
        return self.data, self.sequence_length, self.batch_size, self.max_batches, self.calibration_sequences

    @property
    def scoring(self) -> tuple[Any, ...]:
        """Return what comparable rows share: the text, and how it is cut."""
        return *self.as_named, self.data_fingerprint


@dataclass(frozen=True)
class PostBits:
    """Hold the bits after post-training quantization; None for what is not rounded."""

    post_bits: int | None
    """Bits of the weights."""
    post_activation_bits: int | None
    """Bits of the inputs of layers."""
    post_kv_bits: int | None
    """Bits of keys or values, whichever are fewer."""

    @property
    def of_weights_alone(self) -> int | None:
        """Return the bits of the weights if inputs, keys and values are not rounded, else None."""
        return self.post_bits if self.post_activation_bits is None and self.post_kv_bits is None else None


@dataclass(frozen=True)
class Rounding:
    """Hold the cost of rounding and the layers' reports; None if no layer reported a value."""

    stored_bits: float | None
    """Bits per rounded weight, including its share of scales and zero points."""
    seconds: float
    """Seconds of calibration and rounding."""
    sqnr_least: float | None
    """Signal-to-noise ratio of the worst layer's output, in dB."""
    kurtosis_mean: float | None
    """Kurtosis of a layer's input by channels, mean over layers; see `LayerReport.input_kurtosis_channels`."""
    mmr_mean: float | None
    """Max-median ratio of a layer's input, mean over layers."""
    kurtosis_largest: float | None
    mmr_largest: float | None


@dataclass(frozen=True)
class Row:
    """Hold one line of rows.jsonl."""

    key: str
    """Identifies model, recipe and text; see `rows.row_key`."""
    checkpoint: CheckpointFacts
    text: TextSettings
    recipe: str
    """Name of the recipe."""
    post: dict[str, Any]
    """The recipe in full."""
    bits: PostBits
    damage: Damage
    rounding: Rounding
    noise_floor: float
    """Nats per token by which bf16 arithmetic may change the loss (95 %); smaller differences are not significant."""

    @property
    def scored(self) -> tuple[Any, ...]:
        """Return what rows of one table share: the model, its weights, and the text.

        Weights that were trained anew under the same name have another loss.
        """
        return self.checkpoint.model, self.checkpoint.average, self.base_loss_shown, *self.text.scoring

    @property
    def base_loss_shown(self) -> str:
        """Return the original's loss as reports show it, which tells weights apart, and a run not from its export."""
        return f"{self.damage.base_loss:.4f}"

    @property
    def request(self) -> tuple[Any, ...]:
        """Return what a command asked for, in its words: of two rows with the same, the later one counts."""
        about = self.checkpoint
        return about.model, about.step, about.average, self.recipe, *self.text.as_named

    def to_json(self) -> dict[str, Any]:
        """Return an object of rows.jsonl, with all values at the top level and null for those that are not finite."""
        values: dict[str, Any] = finite(
            {
                "key": self.key,
                **asdict(self.checkpoint),
                **asdict(self.text),
                "recipe": self.recipe,
                "post": self.post,
                **asdict(self.bits),
                **asdict(self.damage),
                **asdict(self.rounding),
                "noise_floor": self.noise_floor,
            }
        )
        return values

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> "Row":
        """Restore a row from an object of rows.jsonl; losses that were not finite become nan.

        Raises:
            KeyError: the object lacks a key.
            ValueError: a value has another type.
        """
        interval = [math.nan if end is None else end for end in item["delta_interval"]]
        losses = {name: math.nan for name in NEVER_NONE if item[name] is None}
        parts = {
            "checkpoint": asdict(from_keys(CheckpointFacts, item)),  # some of whose fields have defaults
            "damage": {**item, **losses, "delta_interval": interval},
            "noise_floor": math.nan if item["noise_floor"] is None else item["noise_floor"],
        }
        return from_keys(cls, {**item, **dict.fromkeys(("text", "bits", "rounding"), item), **parts})
