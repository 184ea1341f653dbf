"""Hold what one recipe does to one checkpoint: a line of rows.jsonl."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plumbline.launcher.runtime.quantize.damage import Damage
from plumbline.launcher.runtime.quantize.facts import CheckpointFacts
from plumbline.launcher.runtime.system.files import finite, from_keys

NEVER_NONE = ("base_loss", "loss", "delta", "perplexity", "kl", "agreement")
"""Numbers of `Damage` for which null in a file says that they were not finite."""


@dataclass(frozen=True)
class TextSettings:
    """Say what text a row's numbers are measured on, and how it is cut."""

    data: str
    data_fingerprint: str
    sequence_length: int
    """Tokens per window."""
    batch_size: int
    """Windows per forward pass; scales of whole tensors are of a batch."""
    max_batches: int | None
    """None: the whole held-out split is scored."""
    calibration_sequences: int

    @property
    def scoring(self) -> tuple[Any, ...]:
        """Return what rows that compare have in common: the text as its user named it, and how it is cut."""
        return self.data, self.sequence_length, self.batch_size, self.max_batches, self.calibration_sequences


@dataclass(frozen=True)
class PostBits:
    """Hold the bits after training; None for what is not rounded."""

    post_bits: int | None
    """Bits of the weights."""
    post_activation_bits: int | None
    """Bits of the inputs of layers."""
    post_kv_bits: int | None
    """Bits of keys or values, whichever are fewer."""

    @property
    def of_weights_alone(self) -> int | None:
        """Return the bits of the weights where inputs, keys and values are left as they are; None elsewhere."""
        return self.post_bits if self.post_activation_bits is None and self.post_kv_bits is None else None


@dataclass(frozen=True)
class Rounding:
    """Hold what rounding took, and what its layers reported; None where no layer reported it."""

    stored_bits: float | None
    """Bits for each rounded weight, its share of scales and zero points included."""
    seconds: float
    """Seconds that calibration and rounding took."""
    sqnr_least: float | None
    """Signal to noise of the output of the worst layer, dB."""
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
    """Another model, recipe or text makes another; see `rows.row_key`."""
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
    """Nats per token that bf16 arithmetic changes; differences below say nothing."""

    @property
    def scored(self) -> tuple[Any, ...]:
        """Return what rows of one table have in common: the model, and the text."""
        return self.checkpoint.model, self.checkpoint.average, *self.text.scoring

    def to_json(self) -> dict[str, Any]:
        """Return an object of rows.jsonl, in which all values stand side by side; null for what is not finite."""
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
        """Return the row of an object of rows.jsonl; a loss that was not finite is nan.

        Raises:
            KeyError: the object lacks a key.
        """
        low, high = (math.nan if end is None else end for end in item["delta_interval"])
        numbers = {name: math.nan for name in NEVER_NONE if item[name] is None}
        return cls(
            key=item["key"],
            checkpoint=from_keys(CheckpointFacts, item),
            text=from_keys(TextSettings, item),
            recipe=item["recipe"],
            post=item["post"],
            bits=from_keys(PostBits, item),
            damage=from_keys(Damage, {**item, **numbers, "delta_interval": (low, high)}),
            rounding=from_keys(Rounding, item),
            noise_floor=math.nan if item["noise_floor"] is None else item["noise_floor"],
        )
