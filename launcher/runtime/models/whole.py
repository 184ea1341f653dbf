"""Check that the weights of a Hugging Face folder are those that its config.json asks for."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

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
