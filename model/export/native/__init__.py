"""Decoders without a stock class: the modelling code that travels with their folder, and what is written beside it.

The two files named in `CODE` are copied into the folder as they are; they import nothing of ours. So is `lookahead.py`,
into the folder of any class whose training taught it to think (../thinker.py).
"""

from pathlib import Path

from plumbline.model.config import ModelConfig
from plumbline.model.export.fold import FOLDED, Weights
from plumbline.model.export.stock import PLAIN, SHAPES, Export

CODE = tuple(Path(__file__).with_name(f"{kind}_plumbline.py") for kind in ("configuration", "modeling"))
MODEL_TYPE = "plumbline"
KEYS = (SHAPES | set(PLAIN)) - set(FOLDED)
"""Keys of a model that the code reads."""


def native(config: ModelConfig, weights: Weights) -> Export:
    """Entries of config.json and weights of a folded decoder: our keys and names."""
    auto_map = {
        "AutoConfig": "configuration_plumbline.PlumblineConfig",
        "AutoModel": "modeling_plumbline.PlumblineModel",
        "AutoModelForCausalLM": "modeling_plumbline.PlumblineForCausalLM",
    }
    return {"model_type": MODEL_TYPE, **config.model_dump(include=set(KEYS)), "auto_map": auto_map}, weights
