"""Read the recipes requested on a command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.config.parse import option_problems, refuse_non_finite
from plumbline.launcher.runtime.config.yaml_files import plain_values, read_yaml
from plumbline.model.quantization.post_training.recipes import SETS, Recipe, recipes


def read_recipes(given: Sequence[str]) -> tuple[tuple[Recipe, ...], frozenset[str]]:
    """Return the recipes given by names, sets and files, and the names of those that no set stands for.

    Raises:
        ValueError: there is no such recipe, or a file cannot be read as recipes.
    """
    named: list[Any] = []
    for each in given:
        if not each.endswith((".yaml", ".yml")):
            named.append(each)
            continue
        content = plain_values(read_yaml(Path(each)), f"--recipes {each}")
        refuse_non_finite(content, f"--recipes {each}")
        if not content:
            raise ValueError(f"--recipes {each}: is empty; write a recipe or a list of them into it")
        named += content if isinstance(content, list) else [content]
    with option_problems(f"--recipes {' '.join(given)}", Recipe):
        found = recipes(named)
    return found, frozenset(each if isinstance(each, str) else each["name"] for each in named) - SETS.keys()
