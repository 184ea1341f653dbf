"""Read measured points from JSON Lines: results of sweeps, rows of quantization reports, any file with the same keys.

parameters       N, without embedding and head           weight_bits activation_bits kv_bits   of training; 16: none
tokens           D                                       post_bits       null: not quantized after training
loss             nats per token                          run             rows of one name are one checkpoint
weight_format    e4m3 and the like, for the float law    group_size      for the granularity law

Rows of quantize.py have base_loss besides, the loss of the checkpoint as it was trained, on the same text: a point of
its own. No law here covers rows that round more than weights after training, or nothing (recipes that only rotate or
smooth), or weights to as many bits as inputs or keys and values had in training, or models of unknown training tokens.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plumbline.launcher.runtime.system.files import read_json_lines
from plumbline.model.scaling_laws.measured import Measured
from plumbline.model.scaling_laws.points import points

NAMES = ("results.jsonl", "rows.jsonl")  # in a folder: of a sweep, of a quantization report
REQUIRED = ("parameters", "tokens", "weight_bits", "activation_bits", "kv_bits")
SCORING = ("data_fingerprint", "sequence_length", "batch_size", "max_batches", "base_loss")
"""What tells points of one run apart: the text, and the weights, which were trained anew if base_loss differs."""
SETTINGS = ("lr", "labels", "post")
"""Other settings in which rows may differ: learning rate and labels in sweeps, the recipe in quantization reports."""
MORE_THAN_WEIGHTS = ("post_activation_bits", "post_kv_bits")
FORMAT = re.compile(r"e(\d+)m(\d+)", re.IGNORECASE)
NOTHING = {"post_bits": math.inf, "group_size": math.nan, "exponent_bits": math.nan, "mantissa_bits": math.nan}


@dataclass(frozen=True)
class Point:
    """Hold one measured point; rows with the same measurement are equal. None means not rounded."""

    run: str
    """Name of the checkpoint."""
    scoring: tuple[Any, ...]
    """The text it was scored on, and the run."""
    parameters: float
    tokens: float
    weight_bits: float
    activation_bits: float
    kv_bits: float
    post_bits: float | None
    group_size: float | None
    exponent_bits: float | None
    mantissa_bits: float | None
    loss: float
    """Nats per token."""


@dataclass(frozen=True)
class Rows:
    """Hold the points that were read."""

    measured: Measured
    files: tuple[Path, ...]
    left_out: dict[str, int]
    """Reason -> number of rows left out."""
    mixed: int
    """Number of combinations (N, D, bits) at which points differ in settings that no law covers (SETTINGS)."""


def read_rows(sources: Sequence[Path]) -> Rows:
    """Read files, or folders that contain one.

    Raises:
        ValueError: there is nothing to read, a row is not a point, or there are no points; names file, line and key.
    """
    files = tuple(file for source in sources for file in _files(source))
    left_out: Counter[str] = Counter()
    seen: dict[Point, dict[str, Any]] = {}  # those of SETTINGS that its row has
    for file in files:
        for place, row in _rows(file):
            reason = _unfinished(row)
            if reason is None:
                point = _point(place, row)
                reason = "repeated" if point in seen else _uncovered(point)
            if reason is None:
                seen[point] = _settings(row)
            else:
                left_out[reason] += 1
    if not seen:
        raise ValueError(f"{', '.join(map(str, files))}: no finished point; left out: {dict(left_out) or 'nothing'}")
    at = points(**{name: _column(seen, name) for name in (*REQUIRED, *NOTHING)})
    runs, scorings = (_numbers([getattr(point, name) for point in seen]) for name in ("run", "scoring"))
    return Rows(Measured(at, _column(seen, "loss"), runs, scorings), files, dict(left_out), _mixed(seen))


def _settings(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row's SETTINGS, with recipes without their name; an unquantized checkpoint has no recipe."""
    settings = {key: row[key] for key in SETTINGS if key in row}
    if row.get("post_bits") is None:
        settings.pop("post", None)
    elif isinstance(row.get("post"), dict):
        settings["post"] = {key: value for key, value in row["post"].items() if key != "name"}
    return settings


def _mixed(seen: Mapping[Point, dict[str, Any]]) -> int:
    """Return the number of places at which there are points of several settings."""
    found: defaultdict[tuple[Point, str], set[str]] = defaultdict(set)
    for point, settings in seen.items():
        place = replace(point, run="", scoring=(), loss=0.0)
        for key, value in settings.items():
            found[place, key].add(json.dumps(value, sort_keys=True))
    return len({place for (place, _), values in found.items() if len(values) > 1})


def _column(seen: Iterable[Point], name: str) -> NDArray[np.float64]:
    """Return one quantity of all points as a column, with its placeholder for None."""
    values = (getattr(point, name) for point in seen)
    return np.array([NOTHING[name] if value is None else value for value in values], np.float64)


def _numbers(names: Sequence[Any]) -> NDArray[np.intp]:
    """Return a number for each name, the same for equal names."""
    known = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([known[name] for name in names], np.intp)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    found = [source / name for name in NAMES if (source / name).is_file()]
    if not found:
        raise ValueError(f"{source}: neither a file nor a folder with {' or '.join(NAMES)}")
    return found


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, found in read_json_lines(file):
        place = f"{file}, line {number}"
        row = {**found, "run": found.get("run") or json.dumps(found, sort_keys=True)}
        yield place, row
        if "base_loss" in row:
            yield place, {**row, "loss": row["base_loss"], **dict.fromkeys(("post", "post_bits", *MORE_THAN_WEIGHTS))}


def layout_of(weight_format: Any) -> tuple[float, float] | None:
    """Return exponent and mantissa bits of a float format, such as e4m3, or None for anything else."""
    layout = FORMAT.fullmatch(str(weight_format))
    return (float(layout[1]), float(layout[2])) if layout else None


def _unfinished(row: dict[str, Any]) -> str | None:
    """Return why a row has no loss to fit, or None for one that has."""
    status, loss = row.get("status", "finished"), row.get("loss", 0.0)
    if status != "finished":
        return str(status)
    if "tokens" in row and row["tokens"] is None:
        return "of unknown training tokens"
    if any(row.get(key) is not None for key in MORE_THAN_WEIGHTS):
        return "with inputs or keys and values quantized after training"
    if row.get("post") is not None and row.get("post_bits") is None:
        return "rotated or smoothed after training, and not quantized"
    return "no loss" if loss is None or (isinstance(loss, float) and not math.isfinite(loss)) else None


def _uncovered(point: Point) -> str | None:
    """Return why the law of post_bits is silent about a point, or None where it is not (PrecisionLaw)."""
    if point.post_bits is None or not min(point.activation_bits, point.kv_bits) <= point.post_bits < point.weight_bits:
        return None
    return "with inputs or keys and values trained in no more bits than weights were rounded to"


def _point(place: str, row: dict[str, Any]) -> Point:
    """Return the point of a row that has a loss.

    Raises:
        ValueError: a number is missing or is none; names the line and the key.
    """
    required = {key: _number(place, row, key) for key in REQUIRED}
    post_bits, group_size = (
        None if row.get(key) is None else _number(place, row, key) for key in ("post_bits", "group_size")
    )
    exponent, mantissa = layout_of(row.get("weight_format")) or (None, None)
    run = str(row["run"])
    return Point(
        run=run,
        scoring=(run, *(row.get(key) for key in SCORING)),
        **required,
        post_bits=post_bits,
        group_size=group_size,
        exponent_bits=exponent,
        mantissa_bits=mantissa,
        loss=_number(place, row, "loss"),
    )


def _number(place: str, row: dict[str, Any], key: str) -> float:
    if key not in row:
        raise ValueError(f"{place}: no key {key!r}; a point has {', '.join((*REQUIRED, 'loss'))}")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{place}: {key} = {value!r} must be a positive number")
    return float(value)
