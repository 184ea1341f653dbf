"""Check that the weights of a Hugging Face folder are those that its config.json asks for, and that it predicts."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

NUMBER = re.compile(r"\.\d+\.")
"""Number of a block within the name of a weight."""


def check_whole(module: nn.Module, found: Mapping[str, Collection[str]], folder: Path) -> None:
    """Refuse a model without some of its weights, or without some of the blocks that the folder has.

    Other unused weights are allowed: a folder may serve several classes, or contain constants of older versions.

    Args:
        module: the model that transformers loaded from the folder.
        found: `missing_keys` and `unexpected_keys` as reported by transformers.
        folder: for errors.

    Raises:
        ValueError: names the folder, and the first such weight.
    """
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{folder}: lacks {len(missing)} weights of {type(module).__name__}, such as {missing[0]}, and "
            "transformers would draw them at random: copy the folder again, or correct config.json"
        )
    names = module.state_dict().keys()
    if more := sorted(name for name in found["unexpected_keys"] if NUMBER.sub(".0.", name, count=1) in names):
        raise ValueError(
            f"{folder}: holds {len(more)} weights of blocks that its config.json does not count, such as {more[0]}: "
            "correct the number of layers there, or copy the folder again"
        )


def check_causal(config: Any, folder: Path) -> None:
    """Refuse an encoder such as BERT, which transformers opens as a causal model although each token sees the later.

    Raises:
        ValueError: names the folder and the class.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    predicts = getattr(config, "is_decoder", False) or getattr(config, "causal", False)  # the latter is XLM's
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not predicts:
        raise ValueError(
            f"{folder}: a {config.model_type} without is_decoder in config.json reads the tokens that it would have to "
            "predict, so it has no loss on text and continues none; give a causal model"
        )
