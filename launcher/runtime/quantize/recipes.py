"""Read the recipes requested on a command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.config.parse import option_problems, refuse_non_finite
from plumbline.launcher.runtime.config.yaml_files import plain_values, read_yaml
from plumbline.model.quantization.post_training.recipes import Recipe, recipes


def read_recipes(given: Sequence[str]) -> tuple[Recipe, ...]:
    """Return the recipes given by names, sets and files.

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
        named += content if isinstance(content, list) else [content]
    with option_problems(f"--recipes {' '.join(given)}", Recipe):
        return recipes(named)
