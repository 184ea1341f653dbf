"""Read the numbers that a run has written so far, by key."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plumbline.data.damage import read_object
from plumbline.launcher.runtime.config.run_files import METRICS
from plumbline.launcher.runtime.run.interventions import Intervention, read_interventions
from plumbline.launcher.runtime.run.status_file import RESULT, STATUS
from plumbline.launcher.runtime.system.files import read_json_lines

Floats = NDArray[np.float64]
Over = Literal["mean", "min", "max"]
EXACT = 2**53  # integers up to here are floats without rounding


@dataclass(frozen=True)
class Series:
    """Hold one number over the run."""

    steps: Floats
    tokens: Floats
    values: Floats

    def where(self, chosen: NDArray[np.bool_]) -> "Series":
        """Return a part of the series."""
        return Series(self.steps[chosen], self.tokens[chosen], self.values[chosen])


@dataclass(frozen=True)
class History:
    """Hold the numbers in a run folder."""

    folder: Path
    result: dict[str, float] | None
    """Numbers of result.json, or None until the last step is evaluated, also if the run was extended since."""
    series: dict[str, Series]
    """Key of metrics.jsonl -> its values, in the order of steps."""
    skipped: list[int]
    """Steps whose update was not applied."""
    interventions: tuple[Intervention, ...] = ()
    """Returns to a checkpoint."""

    @property
    def complete(self) -> bool:
        """Return whether the last step was reached and evaluated."""
        return self.result is not None

    @property
    def step(self) -> int:
        """Return the last step for which there is a number."""
        return int(max(series.steps[-1] for series in self.series.values()))

    @property
    def tokens(self) -> int:
        """Return the tokens of training up to that step."""
        return int(max(series.tokens[-1] for series in self.series.values()))

    def layers(self, quantity: str) -> dict[str, Series]:
        """Return place -> series of quantity/PLACE, in the order of depth."""
        prefix = f"{quantity}/"
        keys = [key for key in sorted(self.series) if key.startswith(prefix) and is_of_a_place(key)]
        return {key.removeprefix(prefix): self.series[key] for key in keys}

    def quantities(self, kind: str = "") -> list[str]:
        """Return the quantities of a kind, or all: gain -> gain/mean_self_attn.q_norm, ..., each once."""
        names = {key.rpartition("/")[0] if is_of_a_place(key) else key for key in self.series}
        return sorted(name for name in names if name.startswith(f"{kind}/" if kind else ""))

    def tokens_at(self, key: str, step: int) -> float:
        """Return the tokens of training at the first record of a number from a step on, else at its last record."""
        series = self.series[key]
        return float(series.tokens[min(int(np.searchsorted(series.steps, step)), len(series.steps) - 1)])

    @property
    def has_speed(self) -> bool:
        """Return whether the run has logged its speed."""
        speed = self.series.get("tokens_per_second")
        return speed is not None and bool((np.isfinite(speed.values) & (speed.values > 0)).any())

    def seconds(self, tokens: Floats) -> Floats:
        """Return the seconds of training up to given tokens, from its speed: without evaluations and saves.

        Raises:
            ValueError: the run has not logged its speed.
        """
        if not self.has_speed:
            raise ValueError(f"{self.folder}: metrics.jsonl has no tokens_per_second; leave out --by time")
        speed = self.series["tokens_per_second"]
        speed = speed.where(np.isfinite(speed.values) & (speed.values > 0))
        at, per_second = speed.tokens, speed.values
        before = max(0.0, 2 * at[0] - at[1]) if len(at) > 1 else 0.0  # a branch does not begin at 0
        passed = np.cumsum(np.diff(at, prepend=before) / per_second)
        return np.asarray(np.interp(tokens, [before, *at], [0.0, *passed]))


def is_of_a_place(key: str) -> bool:
    """Return whether a key is KIND/QUANTITY/PLACE, not a single number or the score of a held-out source."""
    return key.count("/") == 2 and not key.startswith("eval/")


def grid_of(layers: Mapping[str, Series]) -> tuple[Floats, Floats, Floats]:
    """Return steps [times], tokens [times] and values [places, times] of several places, nan where missing."""
    everything = [np.concatenate([getattr(each, name) for each in layers.values()]) for name in ("steps", "tokens")]
    steps, first = np.unique(everything[0], return_index=True)
    grid = np.full((len(layers), len(steps)), np.nan)
    for row, series in enumerate(layers.values()):
        grid[row, np.searchsorted(steps, series.steps)] = series.values
    return steps, everything[1][first], grid


def over_places(layers: Mapping[str, Series], how: Over) -> Series:
    """Return the mean, minimum or maximum over places at each time, ignoring nan."""
    steps, tokens, grid = grid_of(layers)
    if how == "mean":
        known = np.isfinite(grid)
        values = np.where(known, grid, 0).sum(0) / np.maximum(known.sum(0), 1)
        return Series(steps, tokens, np.where(known.any(0), values, np.nan))
    return Series(steps, tokens, (np.fmin if how == "min" else np.fmax).reduce(grid))


def read_history(folder: Path) -> History:
    """Read a run folder; the run may still be in progress.

    Raises:
        ValueError: it is not a run folder, it holds no numbers yet, or a file in it cannot be read.
    """
    file = folder / METRICS
    if not file.is_file() and (folder / STATUS).is_file():
        raise ValueError(f"{folder}: no metrics.jsonl yet: the run has logged nothing; status.py says where it stands")
    if not file.is_file():
        inside = f"{folder}/*" if any(folder.glob("*/metrics.jsonl")) else "runs/quickstart"
        raise ValueError(f"{folder}: no metrics.jsonl there; give a run folder, such as {inside}")
    columns: dict[str, list[tuple[int, int, float]]] = {}
    skipped: list[int] = []
    for number, record in read_json_lines(file):
        place = f"{file}, line {number}"
        step, tokens = (_count(place, record, key) for key in ("step", "tokens"))
        if record.pop("skipped", False):
            skipped.append(step)
        for key, value in _numbers(place, record).items():
            column = columns.setdefault(key, [])
            if column and column[-1][0] >= step:
                raise ValueError(f"{place}: {key} of step {step} after that of step {column[-1][0]}; remove the line")
            column.append((step, tokens, value))
    if not columns:
        raise ValueError(f"{file}: holds no numbers yet; the first come with the first logged step")
    series = {key: Series(*np.array(column, dtype=np.float64).T) for key, column in columns.items()}
    result = _read_result(folder / RESULT, max(column[-1][0] for column in columns.values()))
    return History(folder, result, series, skipped, tuple(read_interventions(folder)))


def _read_result(file: Path, last_step: int) -> dict[str, float] | None:
    """Return the numbers of result.json, or None if it is from an earlier step because the run was extended."""
    result = _numbers(str(file), read_object(file)) if file.is_file() else None
    return None if result is None or result.get("step", last_step) < last_step else result


def _count(place: str, record: dict[str, Any], key: str) -> int:
    """Remove and return a number of steps or tokens from a record."""
    value = record.pop(key, None)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < EXACT:
        raise ValueError(
            f"{place}: {key} = {value!r} is not a number of {key.rstrip('s')}s; correct or remove the line"
        )
    return value


def _numbers(place: str, record: dict[str, Any]) -> dict[str, float]:
    """Return the entries of a record that are numbers."""
    found = {key: value for key, value in record.items() if isinstance(value, (int, float))}
    try:
        return {key: float(value) for key, value in found.items() if not isinstance(value, bool)}
    except OverflowError as error:
        raise ValueError(f"{place}: an integer beyond every float ({error}); correct or remove it") from error
