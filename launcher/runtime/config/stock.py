"""Read the model section of a stock Hugging Face folder, for train.initialize_from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plumbline.data.damage import read_object, reading
from plumbline.data.hub import is_reachable
from plumbline.data.tokenizers import FILES as TOKENIZER_FILES
from plumbline.launcher.runtime.config.parse import parse
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS, CONFIG
from plumbline.model.config import ModelConfig
from plumbline.model.export.from_stock import KINDS, model_section
from plumbline.model.export.native import MODEL_TYPE

HUB = "hf:"
FILES = ["*.json", "*.safetensors"]
"""Patterns of the files that are read of a model on the hub."""
WEIGHTS = "model*.safetensors"
"""Pattern of the files that transformers writes a model's weights to; others hold thoughts, or the weights again."""


def section_of(spec: str) -> dict[str, Any]:
    """Return the model section of the model in a folder.

    Args:
        spec: a folder, or hf:NAME for one on the hub.

    Raises:
        DamagedFileError: there is no such model, or a run cannot start from it.
        ConfigError: its values are invalid for a model.
    """
    source = f"train.initialize_from = {spec}"
    with reading(source):
        section = model_section(stock_entries(stock_folder(spec)))
        parse(ModelConfig, section, source)
    return section


def stock_folder(spec: str) -> Path:
    """Return the folder of a model; for one on the hub, a local folder with at least its config.json."""
    if not spec.startswith(HUB):
        return Path(spec)
    return hub_folder(spec, ["config.json"])


def model_folder(name: str) -> Path:
    """Return the folder of a command's model: for hf:NAME that of its local copy, downloaded if necessary.

    Raises:
        DamagedFileError: the hub does not provide it.
    """
    if not name.startswith(HUB):
        return Path(name)
    with reading(f"--model {name}"):
        return hub_folder(name, [*FILES, *TOKENIZER_FILES])


def hub_folder(spec: str, patterns: Sequence[str], download: bool = True) -> Path:
    """Return the folder on this machine of a model on the hub, with the files of these patterns.

    Raises:
        ValueError: the hub cannot be reached, and the files are not here.
        OSError: the hub does not have the model, or refuses it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, here = spec.removeprefix(HUB), not (download and is_reachable())
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=here))
    except LocalEntryNotFoundError as error:
        raise ValueError(
            "the hub cannot be reached, and this machine has no copy; give a folder, or see to the network (HF_HOME is "
            "where copies are kept)"
        ) from error


def stock_entries(folder: Path) -> dict[str, Any]:
    """Return the configuration of a Hugging Face folder, with all defaults filled in if the model is supported."""
    from transformers import AutoConfig

    if not folder.exists():
        raise ValueError("no such folder" + ("" if folder.is_absolute() else f"; of the hub it would be {HUB}{folder}"))
    if not (folder / "config.json").is_file():
        is_ours = (folder / CHECKPOINTS).is_dir() or (folder / CONFIG).is_file()  # a run, or a checkpoint
        hint = f"; it is of a run: python launcher/export.py --model {folder} makes one of it" if is_ours else ""
        raise ValueError(f"not a Hugging Face folder (no config.json){hint}")
    entries = read_object(folder / "config.json")
    if entries.get("model_type") in KINDS.keys() - {MODEL_TYPE}:  # our own files have every key
        entries = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    return entries
