"""Export the thinker of latent lookahead beside a model: it turns a final state of the class into a slot's input.

    in training     (state * initializer_range * gain + role) * embedding multiplier
    exported        state * gain + role

A class's states are ours times a factor if the head is tied, come before an embedding projection, and are wider with
constant channels. Granite multiplies `inputs_embeds`; classes with learned positions add them. `native/lookahead.py` is
the code that uses it, copied unchanged.
"""

from pathlib import Path
from typing import Any

import torch

from plumbline.model.config import ModelConfig
from plumbline.model.export.fold import Weights
from plumbline.model.export.targets import TARGETS, resolved
from plumbline.model.objectives.objective import Decoding
from plumbline.model.parameterization.multipliers import Multipliers

CODE = Path(__file__).with_name("native") / "lookahead.py"
FILE = "lookahead.safetensors"


def export_thinker(
    target: str, config: ModelConfig, multipliers: Multipliers, decoding: Decoding, weights: Weights
) -> tuple[dict[str, Any], Weights]:
    """Return the settings and fp32 tensors that this code reads.

    Args:
        target: as for `to_hugging_face`.
        config: the decoder's shape.
        multipliers: those that its forward pass applies.
        decoding: how the model was trained to think.
        weights: fp32 weights by name, those of the objective included.
    """
    home = TARGETS[resolved(target, config)]
    embedding = home.folds(config, multipliers).embedding
    role, gain = weights["objective.thinker.role"], weights["objective.thinker.gain"]
    thinker = {"role": role * embedding, "gain": gain * config.initializer_range * embedding}
    if "objective.thinker.waiting" in weights:
        thinker["waiting"] = (weights["objective.thinker.waiting"] + role) * embedding
    if config.embedding_projection:
        thinker["projection"] = weights["model.output_projection.weight"]
    thoughts = decoding.thinker.settings
    settings: dict[str, Any] = {
        "horizon": thoughts.horizon,
        "growth": thoughts.growth,
        "within": "bidirectional" if thoughts.bidirectional else "causal",
        "commit": "thoughts" if decoding.commits else "none",
        "passes": thoughts.passes,
        "window": config.sliding_window,
        "norm_eps": None,
    }
    scale = home.state_scale(config, multipliers)
    if config.final_norm:
        thinker["gain"] = thinker["gain"] / scale
    else:  # a state is normalised first, so its scale does not matter
        settings["norm_eps"] = torch.finfo(torch.float32).eps * scale**2
    return home.adapt_thinker(config, settings, thinker)
