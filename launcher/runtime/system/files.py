"""Write files that are there whole or not at all."""

import json
import shutil
from pathlib import Path
from typing import Any
import torch
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import differences, load_config, save_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.system.world import World
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.models.open import load_model, load_tokenizer
from plumbline.launcher.runtime.run.metrics import environment


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, whoever is killed meanwhile."""
    staging = path.with_name(f".{path.name}.staging")
    staging.write_text(text, encoding="utf-8")
    staging.replace(path)
