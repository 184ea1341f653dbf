"""Keep a row for each checkpoint and recipe in rows.jsonl, and what each layer reported in layers.jsonl.

Rows that are there already are not measured again: the same command goes on where it stopped.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from plumbline.data.streams import SampleSource
from plumbline.launcher.runtime.models.open import LoadedModel
from plumbline.launcher.runtime.quantize.damage import compare, damage
from plumbline.launcher.runtime.quantize.facts import checkpoint_facts
from plumbline.launcher.runtime.system import cli
from plumbline.launcher.runtime.system.files import read_json_lines, write_json_lines
from plumbline.model.quantization.post_training.apply import check_recipe, quantize_model
from plumbline.model.quantization.post_training.recipes import Recipe
from plumbline.model.quantization.post_training.report import LayerReport

ROWS, LAYERS = "rows.jsonl", "layers.jsonl"
ROW_START = '{"key": '
Batches = Callable[[], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True)
class Text:
    """Hold the text that models are scored and calibrated on."""

    source: SampleSource
    sequence_length: int
    batches: Batches
    """Batches of the held-out split, the same at each call."""
    calibration: Sequence[Tensor]
    """Token ids [B, T] of the training split."""
    settings: Mapping[str, Any]
    """Settings that a row's numbers depend on beside model and recipe."""


def measure(model: LoadedModel, recipe: Recipe, text: Text) -> tuple[dict[str, Any], list[LayerReport]]:
    """Return the row of one recipe, and its layers."""
    started = time.monotonic()
    quantized = replace(model, module=deepcopy(model.module))
    layers = quantize_model(quantized.module, recipe, text.calibration)
    seconds = time.monotonic() - started
    found = damage(compare(model, quantized, text.batches()), text.source.held_out)
    weights = sum(math.prod(report.shape) for report in layers)
    outliers = {
        "kurtosis": [layer.input_kurtosis_channels for layer in layers if layer.input_kurtosis_channels is not None],
        "mmr": [layer.input_mmr for layer in layers if layer.input_mmr is not None],
    }
    row = {
        **checkpoint_facts(model),
        **text.settings,
        "recipe": recipe.name,
        "post": recipe.model_dump(exclude_none=True),
        **precision_after(recipe),
        **asdict(found),
        "stored_bits": sum(layer.stored_bits * math.prod(layer.shape) for layer in layers) / weights
        if layers
        else None,
        "seconds": round(seconds, 3),
        "sqnr_least": min((layer.output_sqnr for layer in layers if layer.output_sqnr is not None), default=None),
        **{f"{name}_mean": sum(values) / len(values) if values else None for name, values in outliers.items()},
        **{f"{name}_largest": max(values, default=None) for name, values in outliers.items()},
    }
    return row, layers


def precision_after(recipe: Recipe) -> dict[str, Any]:
    """Return the bits after training: `post_bits` of the weights, and of what else is rounded; None: not rounded."""
    weights, inputs, keys, values = recipe.weights, recipe.activations, recipe.keys, recipe.values
    return {
        "post_bits": None if weights is None else weights.numbers.bits,
        "post_activation_bits": None if inputs is None else inputs.numbers.bits,
        "post_kv_bits": min((each.numbers.bits for each in (keys, values) if each is not None), default=None),
    }


def noise_floor(model: LoadedModel, text: Text) -> float:
    """Return by how many nats per token bf16 arithmetic changes a model's loss: differences below say nothing."""
    rounded = replace(model, module=deepcopy(model.module).to(torch.bfloat16))
    return abs(damage(compare(model, rounded, text.batches()), text.source.held_out).delta)


def row_key(model: LoadedModel, recipe: Recipe, text: Text) -> str:
    """Return the key of a row: another model, recipe or text makes another."""
    what = {
        "model": str(model.source.resolve()),
        "weights": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(model.source)],
        "step": model.step,
        "average": model.average,
        "recipe": recipe.model_dump(),
        "text": dict(text.settings),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights of a checkpoint or a Hugging Face folder; their times tell of a rewrite."""
    return sorted(folder.rglob("*.safetensors"))


class RowFile:
    """Keep rows.jsonl and layers.jsonl of one folder."""

    def __init__(self, folder: Path) -> None:
        """Read what is there; a line that a crash cut off is dropped."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.rows = _read(folder / ROWS)
        known = {row["key"] for row in self.rows}
        layers = [layer for layer in _read(folder / LAYERS) if layer["key"] in known]
        for name, items in ((ROWS, self.rows), (LAYERS, layers)):
            if (folder / name).is_file():
                write_json_lines(folder / name, items)

    def __contains__(self, key: str) -> bool:
        return any(row["key"] == key for row in self.rows)

    def add(self, key: str, row: Mapping[str, Any], layers: Sequence[LayerReport]) -> dict[str, Any]:
        """Write a row; its layers first, so that a row is there only when all of it is."""
        with (self.folder / LAYERS).open("a", encoding="utf-8") as file:
            about = {"key": key, "model": row["model"], "recipe": row["recipe"]}
            file.writelines(_line({**about, **asdict(layer)}) for layer in layers)
        whole = {"key": key, **row}
        with (self.folder / ROWS).open("a", encoding="utf-8") as file:
            file.write(_line(whole))
        self.rows.append(whole)
        return whole


def _line(item: Mapping[str, Any]) -> str:
    """Return one line of JSON, which has no infinity."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in item.items()
    }
    return json.dumps(finite) + "\n"


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file in JSON Lines; none if there is no such file."""
    return [item for _, item in read_json_lines(path)] if path.is_file() else []


def measure_missing(
    model: LoadedModel, wanted: Sequence[Recipe], text: Text, rows: RowFile, asked: Sequence[str]
) -> None:
    """Measure all recipes of one model that have no row yet.

    Args:
        model: as it was trained.
        wanted: recipes. One that the model has no room for is left out with a word.
        text: what to score and calibrate on.
        rows: where rows go.
        asked: names that must not be left out, since they were given one by one and not as part of a set.

    Raises:
        ValueError: a recipe that was asked for does not fit; nothing has been measured then.
    """
    missing = {row_key(model, recipe, text): recipe for recipe in wanted}
    missing = {key: recipe for key, recipe in missing.items() if key not in rows and _fits(model, recipe, text, asked)}
    if not missing:
        return
    floor = noise_floor(model, text)
    bar = tqdm(missing.items(), desc=str(model.source), unit="recipe", disable=None)
    for key, recipe in bar:
        bar.set_postfix_str(recipe.name)
        row, layers = measure(model, recipe, text)
        rows.add(key, {**row, "noise_floor": floor}, layers)


def _fits(model: LoadedModel, recipe: Recipe, text: Text, asked: Sequence[str]) -> bool:
    """Return whether a model can be quantized so; if not, say why."""
    try:
        check_recipe(model.module, recipe, len(text.calibration))
    except ValueError as error:
        if recipe.name in asked:
            raise
        cli.say(f"left out: {error}")
        return False
    return True
