"""Export the thinker of latent lookahead beside a model: it turns a final state of the class into a slot's input.

    in training     (state * initializer_range * gain + role) * embedding multiplier
    exported        state * gain + role

`thinker_from` turns it back, for a run that starts from the folder.

A class's states are ours times a factor if the head is tied, come before an embedding projection, and are wider with
constant channels. Granite multiplies `inputs_embeds`; classes with learned positions add them. `native/lookahead.py` is
the code that uses it, copied unchanged.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from plumbline.model.config import ModelConfig
from plumbline.model.export.fold import Weights, state_scale
from plumbline.model.export.from_stock import missing_multipliers
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


def thinker_from(
    entries: Mapping[str, Any],
    settings: Mapping[str, Any],
    tensors: Weights,
    config: ModelConfig,
    multipliers: Multipliers,
) -> Weights | None:
    """Return the tensors of an exported thinker under our names, to think as the folder does.

    Args:
        entries: config.json of the folder, with every default filled in.
        settings: those that `export_thinker` returned.
        tensors: its fp32 tensors.
        config: the decoder, as `from_stock` fills it.
        multipliers: those that its forward pass applies.

    Returns:
        The tensors, or None if this decoder's states cannot become such inputs: they would need a projection, or a norm
        that only a decoder without a final one has.
    """
    if "projection" in tensors or (settings["norm_eps"] is None) != config.final_norm:
        return None
    applied = entries.get("embedding_multiplier", 1.0)  # to what enters in place of embeddings, by Granite alone
    inputs = applied / multipliers.embedding
    scale = state_scale(config, missing_multipliers(entries, config, multipliers))
    role = tensors["role"] * inputs
    thinker = {"role": role, "gain": tensors["gain"] * inputs / (config.initializer_range * scale)}
    if "waiting" in tensors:
        thinker["waiting"] = tensors["waiting"] * inputs - role
    return {f"objective.thinker.{name}": tensor for name, tensor in thinker.items()}
