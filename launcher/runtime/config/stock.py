"""Read which model a stock Hugging Face folder holds, for train.initialize_from."""

import json
from pathlib import Path
from typing import Any

from plumbline.model.export.from_stock import KINDS, model_section

HUB = "hf:"


def section_of(spec: str) -> dict[str, Any]:
    """The model section that computes what the folder computes.

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
    """The folder of a model, downloaded first if it is on the hub."""
    if not spec.startswith(HUB):
        return Path(spec)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(spec.removeprefix(HUB), allow_patterns=["*.json", "*.safetensors"]))


def stock_entries(folder: Path) -> dict[str, Any]:
    """The configuration of a Hugging Face folder; of the kinds that can be taken over, every default filled in."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError("not a Hugging Face folder (no config.json)")
    entries: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if entries.get("model_type") in KINDS:
        entries = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    return entries
