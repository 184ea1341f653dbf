"""Export decoders that no stock class can express, in a folder with their own modelling code.

The two files named in `CODE` are copied into the folder unchanged; they import nothing of ours. So is `lookahead.py`,
for any model that was trained to think, whatever its class (../thinker.py).
"""

from dataclasses import dataclass
from pathlib import Path

from plumbline.model.attention import attention_kind
from plumbline.model.blocks import block_kind
from plumbline.model.config import ModelConfig
from plumbline.model.export.fold import FOLDED, Weights, fold_multipliers, folded_config
from plumbline.model.export.stock import GATED, PLAIN, SHAPES, UNGATED, Export, Target
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.rotary import rotary_frequencies

CODE = tuple(Path(__file__).with_name(f"{kind}_plumbline.py") for kind in ("configuration", "modeling"))
MODEL_TYPE = "plumbline"
AUTO_MAP = {
    "AutoConfig": "configuration_plumbline.PlumblineConfig",
    "AutoModel": "modeling_plumbline.PlumblineModel",
    "AutoModelForCausalLM": "modeling_plumbline.PlumblineForCausalLM",
}
KEYS = (SHAPES | set(PLAIN)) - set(FOLDED) - {"rope_scaling"}
"""Model keys that the code reads. For scaled positions it reads the resulting frequencies instead."""
KNOWN = {
    "mlp": (*GATED, *UNGATED, "shaped_relu", "xielu"),
    "norm": ("rmsnorm", "layernorm"),
    "position_embedding": ("rope", "learned"),
}
"""Values that the code has of keys without a class of kinds."""


@dataclass(frozen=True)
class Native(Target):
    """Write any decoder whose kinds the modelling code has, with our keys and names."""

    code = CODE

    def refusal(self, config: ModelConfig) -> str | None:
        """Return which feature the modelling code lacks, or None."""
        reasons = {
            "block": block_kind(config).no_native_code,
            "attention": attention_kind(config).no_native_code,
        }
        folded = folded_config(config)
        lacking = (key for key, values in KNOWN.items() if getattr(folded, key) not in values)
        reasons |= dict.fromkeys(lacking, f"model/export/native/{CODE[1].name} lacks it")
        for key, reason in reasons.items():
            if reason is not None:
                return f"cannot hold model.{key} = {getattr(config, key)}: {reason}"
        return None

    def export(self, config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
        """Fold every multiplier into the weights, except the skip gain, which is a configuration entry."""
        entries = folded_config(config).model_dump(include=set(KEYS)) | {"skip_gain": multipliers.skip}
        if config.rope_scaling is not None:
            frequencies, magnitude = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
            entries |= {"rope_frequencies": frequencies.tolist(), "rope_magnitude": magnitude}
        return {"model_type": MODEL_TYPE, **entries, "auto_map": AUTO_MAP}, fold_multipliers(
            weights, config, multipliers
        )


NATIVE = Native()
