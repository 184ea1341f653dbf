"""Read which model a stock Hugging Face folder holds, for train.initialize_from."""

import json
from pathlib import Path
from typing import Any

from plumbline.model.export.from_stock import KINDS, model_section

HUB = "hf:"


def section_of(spec: str) -> dict[str, Any]:
    """Return the model section that computes what the folder computes.

    Args:
        spec: a folder, or hf:NAME for one of the hub.

    Raises:
        ValueError: there is no such model, or none that a run can start from.
    """
    try:
        return model_section(stock_entries(stock_folder(spec)))
    except ValueError as error:
        raise ValueError(f"train.initialize_from = {spec}: {error}") from error


def stock_folder(spec: str) -> Path:
    """Return the folder of a model; of one on the hub, a folder with its config.json and whatever is there already."""
    if not spec.startswith(HUB):
        return Path(spec)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(spec.removeprefix(HUB), allow_patterns=["config.json"]))


def stock_entries(folder: Path) -> dict[str, Any]:
    """Return the configuration of a Hugging Face folder, with every default filled in where it can be taken over."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError("not a Hugging Face folder (no config.json)")
    entries: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if entries.get("model_type") in KINDS:
        entries = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    return entries
