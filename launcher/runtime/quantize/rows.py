"""Keep a row per checkpoint and recipe in rows.jsonl, and the reports of layers in layers.jsonl.

Existing rows are not measured again, so repeating a command resumes it. If weights, a recipe or a text have changed
under the same name, the new row replaces the earlier one, which moves to superseded.jsonl. Several processes may
measure for one folder.
"""

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plumbline.data.damage import reading
from plumbline.data.streams import SampleSource
from plumbline.launcher.runtime.commands.progress import watched
from plumbline.launcher.runtime.models.open import LoadedModel
from plumbline.launcher.runtime.quantize.damage import compare, damage
from plumbline.launcher.runtime.quantize.facts import checkpoint_facts
from plumbline.launcher.runtime.quantize.row import PostBits, Rounding, Row, TextSettings
from plumbline.launcher.runtime.system.faults import is_out_of_memory
from plumbline.launcher.runtime.system.files import (
    finite,
    key_of,
    naming,
    one_at_a_time,
    read_json_lines,
    write_json_lines,
)
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.quantization.post_training.apply import check_recipe, quantize_model
from plumbline.model.quantization.post_training.calibration import Sample
from plumbline.model.quantization.post_training.recipes import Recipe
from plumbline.model.quantization.post_training.report import LayerReport
from plumbline.model.stock_inputs import DOCUMENT_MASK

ROWS, LAYERS, SUPERSEDED, LOCK = "rows.jsonl", "layers.jsonl", "superseded.jsonl", "lock"
ROW_START = '{"key": '
Batches = Callable[[], Iterable[Mapping[str, Any]]]
Line = tuple[Row, dict[str, Any]]  # with the object that it was read from


@dataclass(frozen=True)
class Text:
    """Hold the text on which models are scored and calibrated."""

    source: SampleSource
    batches: Batches
    """Batches of the held-out split, the same at each call."""
    calibration: Sequence[Sample]
    """Batches of the training split."""
    settings: TextSettings
    """Settings on which a row depends besides model and recipe."""


def measure(
    key: str, model: LoadedModel, recipe: Recipe, text: Text, noise_floor: float
) -> tuple[Row, list[LayerReport]]:
    """Measure one recipe, and return its row and the reports of its layers."""
    started = time.monotonic()
    quantized = replace(model, module=deepcopy(model.module))
    layers = quantize_model(quantized.module, recipe, text.calibration)
    seconds = time.monotonic() - started
    found = damage(compare(model, quantized, text.batches()), text.source.held_out)
    row = Row(
        key=key,
        checkpoint=checkpoint_facts(model),
        text=text.settings,
        recipe=recipe.name,
        post=recipe.model_dump(exclude_none=True),
        bits=bits_after(recipe),
        damage=found,
        rounding=summarize(layers, seconds),
        noise_floor=noise_floor,
    )
    return row, layers


def bits_after(recipe: Recipe) -> PostBits:
    """Return the bits that a recipe leaves after rounding."""
    weights, inputs, keys, values = recipe.weights, recipe.activations, recipe.keys, recipe.values
    return PostBits(
        post_bits=None if weights is None else weights.numbers.bits,
        post_activation_bits=None if inputs is None else inputs.numbers.bits,
        post_kv_bits=min((each.numbers.bits for each in (keys, values) if each is not None), default=None),
    )


def summarize(layers: Sequence[LayerReport], seconds: float) -> Rounding:
    """Summarise the reports of all layers of a rounding that took `seconds` seconds."""
    weights = [math.prod(layer.shape) for layer in layers]
    stored = sum(layer.stored_bits * count for layer, count in zip(layers, weights, strict=True))
    kurtoses = [layer.input_kurtosis_channels for layer in layers if layer.input_kurtosis_channels is not None]
    ratios = [layer.input_mmr for layer in layers if layer.input_mmr is not None]
    return Rounding(
        stored_bits=stored / sum(weights) if layers else None,
        seconds=round(seconds, 3),
        sqnr_least=min((layer.output_sqnr for layer in layers if layer.output_sqnr is not None), default=None),
        kurtosis_mean=sum(kurtoses) / len(kurtoses) if kurtoses else None,
        mmr_mean=sum(ratios) / len(ratios) if ratios else None,
        kurtosis_largest=max(kurtoses, default=None),
        mmr_largest=max(ratios, default=None),
    )


def noise_floor(model: LoadedModel, text: Text) -> float:
    """Return by how many nats per token bf16 arithmetic may change a model's loss: less is not significant.

    It is the end farther from zero of the 95 % interval of the change here, since the change itself may be near zero by
    chance.
    """
    rounded = replace(model, module=in_bf16(model.module))
    found = damage(compare(model, rounded, text.batches()), text.source.held_out)
    ends = (found.delta, *found.delta_interval)
    return max((abs(each) for each in ends if not math.isnan(each)), default=math.nan)


def in_bf16(module: nn.Module) -> nn.Module:
    """Return a copy with its weights in bf16; buffers, such as rotary frequencies, stay in fp32 as on loading."""
    rounded = deepcopy(module)
    for parameter in rounded.parameters():
        if parameter.is_floating_point():  # a quantized folder has codes besides
            parameter.data = parameter.data.to(torch.bfloat16)
    return rounded


def row_key(model: LoadedModel, recipe: Recipe, text: Text) -> str:
    """Return the key of a row, which identifies model, recipe and text."""
    # With rounded keys and values, folders of runs that masked documents used to see all of them
    sees_less = model.config is None and getattr(model.module.config, DOCUMENT_MASK, False)
    revision = recipe.revision + int(sees_less and not (recipe.keys is None and recipe.values is None))
    what = {
        "model": str(model.source.resolve()),
        "weights": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(model.source)],
        "step": model.step,
        "average": model.average,
        "recipe": recipe.model_dump(),
        "text": asdict(text.settings),
        **({"revision": revision} if revision else {}),  # else as in rows from before it was counted
    }
    return key_of(what)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint or a Hugging Face folder, whose times reveal a rewrite."""
    return sorted(folder.rglob("*.safetensors"))


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a folder that count, without changing it.

    Raises:
        ValueError: a line is not a row; names the file and the line.
    """
    return [row for row, _ in _rows(folder)[0]]


class RowFile:
    """Keep rows.jsonl and layers.jsonl of one folder."""

    def __init__(self, folder: Path) -> None:
        """Read existing rows; a line that a crash cut off is dropped.

        Raises:
            ValueError: a line is not a row; names the file and the line. No file has changed then.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.rows: list[Row] = []
        if any((folder / name).is_file() for name in (ROWS, LAYERS)):
            with self._alone():
                self._settle()

    def _alone(self) -> AbstractContextManager[None]:
        """Keep other processes that measure for this folder from changing its files meanwhile."""
        return one_at_a_time(self.folder / LOCK)

    def _settle(self) -> None:
        """Read the rows that count, and move the others to superseded.jsonl; the lines of their layers go."""
        rows, earlier = _rows(self.folder)
        self.rows = [row for row, _ in rows]
        known = {row.key for row in self.rows}
        # Two processes that measured the same at once have written it twice
        superseded = [(row, line) for row, line in earlier if row.key not in known]
        layers = {
            (layer["key"], layer["name"]): layer for _, layer in _read(self.folder / LAYERS) if layer["key"] in known
        }
        if superseded:
            _append(self.folder / SUPERSEDED, [line for _, line in superseded])
            names = ", ".join(sorted({f"{row.recipe} of {row.checkpoint.model}" for row, _ in superseded}))
            LOG.info(
                f"{self.folder / ROWS}: weights, recipe or text changed under the same name: {names}; the earlier rows "
                f"moved to {SUPERSEDED}"
            )
        for name, items in ((ROWS, [line for _, line in rows]), (LAYERS, layers.values())):
            if (self.folder / name).is_file():
                write_json_lines(self.folder / name, items)  # including unknown keys

    def __contains__(self, key: str) -> bool:
        return any(row.key == key for row in self.rows)

    def add(self, row: Row, layers: Sequence[LayerReport]) -> None:
        """Write a row after its layers, so that a row that exists is complete."""
        about = {"key": row.key, "model": row.checkpoint.model, "recipe": row.recipe}
        with self._alone():
            if any(_is_torn(self.folder / name) for name in (ROWS, LAYERS)):
                self._settle()  # another process was killed while it wrote a line, which this one must not continue
            _append(self.folder / LAYERS, [finite({**about, **asdict(layer)}) for layer in layers])
            _append(self.folder / ROWS, [row.to_json()])
            if any(row.request == other.request for other in self.rows):
                self._settle()
            else:
                self.rows.append(row)


def _append(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Append objects to a JSON Lines file."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(item) + "\n" for item in items)


def _is_torn(path: Path) -> bool:
    """Return whether the last line of a file has no end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _row(place: str, item: Mapping[str, Any]) -> Row:
    with reading(place, "it is no row of quantize.py: give another folder"):
        return Row.from_json(item)


def _rows(folder: Path) -> tuple[list[Line], list[Line]]:
    """Return the rows of a folder that count, and those that a later row of the same request stands for."""
    lines = [(_row(f"{folder / ROWS}, line {number}", item), item) for number, item in _read(folder / ROWS)]
    last = {row.request: number for number, (row, _) in enumerate(lines)}
    counting = set(last.values())
    kept = [line for number, line in enumerate(lines) if number in counting]
    return kept, [line for number, line in enumerate(lines) if number not in counting]


def _read(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return number and object of each line of a JSON Lines file; empty if there is no such file."""
    return list(read_json_lines(path)) if path.is_file() else []


def measure_missing(model: LoadedModel, wanted: Sequence[Recipe], text: Text, rows: RowFile) -> list[str]:
    """Measure all recipes of one model that have no row yet, and return why the others failed, by name.

    Args:
        model: the model as trained.
        wanted: recipes that fit the model, see `fitting`.
        text: what to score and calibrate on.
        rows: where rows go.
    """
    missing = {row_key(model, recipe, text): recipe for recipe in wanted}
    missing = {key: recipe for key, recipe in missing.items() if key not in rows}
    if not missing:
        return []
    floor = noise_floor(model, text)
    failed = []
    for key, recipe in watched(missing.items(), len(missing), f"{model.source}: recipe"):
        try:
            measured = measure(key, model, recipe, text, floor)
        except (ValueError, RuntimeError) as error:
            if not isinstance(error, ValueError) and not is_out_of_memory(error):
                raise
            failed.append(f"recipe {recipe.name} of {model.source}: {str(error).splitlines()[0]}")
        else:
            rows.add(*measured)
    return failed


def fitting(model: LoadedModel, wanted: Sequence[Recipe], text: Text, asked: Collection[str]) -> list[Recipe]:
    """Return the recipes that fit a model, whose weights are not needed; log why the others are left out.

    Args:
        model: the model.
        wanted: recipes.
        text: what to calibrate on.
        asked: names that must not be left out, since they were requested individually and not as part of a set.

    Raises:
        ValueError: a recipe requested individually does not fit.
    """
    found = []
    for recipe in wanted:
        try:
            check_recipe(model.module, recipe, len(text.calibration))
        except ValueError as error:
            if recipe.name in asked:
                raise
            LOG.info(f"left out: {error}")
        else:
            found.append(recipe)
    return found
