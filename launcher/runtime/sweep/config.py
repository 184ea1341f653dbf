"""Define the configuration of a sweep: a base run, grids of values to try, and how to evaluate the results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, NonNegativeInt, field_validator
from pydantic import model_validator as validator

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.parse import parse
from plumbline.launcher.runtime.config.sections import FolderName
from plumbline.launcher.runtime.config.yaml_files import plain_values, read_yaml
from plumbline.launcher.runtime.sweep.comparison import ComparisonConfig
from plumbline.launcher.runtime.sweep.coordinate_check import CoordinateCheckConfig
from plumbline.launcher.runtime.sweep.kinds import KINDS, Kind
from plumbline.launcher.runtime.sweep.lr_transfer import LrTransferConfig
from plumbline.launcher.runtime.sweep.root import USUAL, root_of

Values = dict[str, Any]  # section.key -> value
Axis = list[Any] | dict[str, Values]
OURS = ("run.name", "run.root", "run.seed")  # keys that the sweep sets for each cell


class GridConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure the product of some axes."""

    axes: dict[str, Axis] = Field(min_length=1)
    """Axis -> its values: a config key with values, or a name with labelled sets of keys and values."""

    @field_validator("axes", mode="before")
    @classmethod
    def _check_axis(cls, axes: Any) -> Any:
        if not isinstance(axes, dict):
            return axes
        for axis, values in axes.items():
            if isinstance(values, list) and values:
                if "." not in str(axis):
                    raise ValueError(
                        f"{axis} = {values}: an axis with a list of values is a config key, for example optimizer.lr; "
                        "an axis with a name of its own holds labelled sets of keys"
                    )
            elif not (isinstance(values, dict) and values and all(isinstance(set_, dict) for set_ in values.values())):
                raise ValueError(
                    f"{axis} = {values!r}: an axis is a list of values, [0.001, 0.002], or labelled sets of keys, "
                    "{small: {model.hidden_size: 64}}"
                )
        return {axis: _with_text_labels(values) for axis, values in axes.items()}

    @validator(mode="after")
    def _check(self) -> "GridConfig":
        keys: dict[str, str] = {}
        for axis, values in self.axes.items():
            for key in axis_keys(axis, values):
                if keys.setdefault(key, axis) != axis:
                    raise ValueError(f"axes {keys[key]} and {axis} both set {key}: one of them would have no say")
        _refuse_our_keys("axes", keys)
        return self


class SweepConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure a sweep. Its cells are the union of its grids, repeated for each seed."""

    name: FolderName
    """Name of the sweep and of its folder."""
    root: str = USUAL
    """Folder that holds sweep folders. Default: `sweeps` in the run.root of the base, which is runs by default."""
    kind: str = "grid"
    """How to evaluate the results. grid: a table of all cells; comparison: which variant is best if each is tuned?
    lr_transfer: does the best learning rate stay the same? coordinate_check: do activations and their changes keep
    their size?"""
    base: str
    """YAML file of the run that every cell starts from, relative to the sweep's file."""
    set: Values = {}
    """section.key -> value, overrides of the base for all cells."""
    seeds: list[NonNegativeInt] = Field(default=[1], min_length=1)
    """run.seed of the repetitions of each cell."""
    grids: list[GridConfig] = Field(min_length=1)
    """The cells: the union of these grids."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of finished cells."""
    comparison: ComparisonConfig | None = None
    """Settings of kind comparison."""
    lr_transfer: LrTransferConfig | None = None
    """Settings of kind lr_transfer."""
    coordinate_check: CoordinateCheckConfig | None = None
    """Settings of kind coordinate_check."""

    @validator(mode="before")
    @classmethod
    def _check_grids(cls, values: Any) -> Any:
        """Explain where axes and keys of a run belong if they are misplaced."""
        if not isinstance(values, dict):
            return values
        if keys := [key for key in values if "." in str(key)]:
            raise ValueError(f"{keys[0]} belongs under set:, for all cells, or into the axes of an entry of grids:")
        grids = values.get("grids")
        entries = grids if isinstance(grids, list) else []
        if "axes" in values or isinstance(grids, dict) or any(map(_is_bare_grid, entries)):
            raise ValueError(
                "axes belong under grids:, in entries of a list: grids: [{axes: {optimizer.lr: [0.001, 0.002]}}]"
            )
        return values

    @validator(mode="after")
    def _check(self) -> "SweepConfig":
        if self.kind not in KINDS:
            raise ValueError(f"kind = {self.kind!r}: known kinds are {', '.join(KINDS)}")
        for kind in KINDS:
            if kind != self.kind and getattr(self, kind, None) is not None:
                raise ValueError(f"{kind}: settings of another kind than this sweep's, {self.kind}: set kind: {kind}")
        for key in self.set:
            if all(key in grid.axes for grid in self.grids):
                raise ValueError(f"set: {key} is an axis of every grid, too, and would have no say: leave it out")
        if len(frozenset(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds = {self.seeds}: one is there twice")
        if nested := next((key for key, value in self.set.items() if "." not in key and isinstance(value, dict)), None):
            keys = ", ".join(f"{nested}.{key}" for key in self.set[nested])
            raise ValueError(f"set: {nested} is a section: write its keys with their paths, {keys}")
        _refuse_our_keys("set", self.set)
        return self

    @property
    def folder(self) -> Path:
        """Return the sweep's folder, root/name."""
        return Path(self.root) / self.name

    @property
    def how(self) -> Kind[Any]:
        """Return how this kind of sweep is run and evaluated."""
        return KINDS[self.kind]

    @property
    def settings(self) -> Any:
        """Return the settings block named after the kind, or None if there is none."""
        return getattr(self, self.kind, None)


def _is_bare_grid(entry: Any) -> bool:
    """Return whether an entry of grids has config keys in place of `axes`."""
    return isinstance(entry, dict) and "axes" not in entry and any("." in str(key) for key in entry)


def axis_keys(axis: str, values: Axis) -> list[str]:
    """Return the config keys that an axis sets."""
    return [axis] if isinstance(values, list) else list(dict.fromkeys(key for keys in values.values() for key in keys))


def load_sweep(path: Path) -> SweepConfig:
    """Read a sweep's YAML file.

    Raises:
        ConfigError: it cannot be read, or a key, type or value in it is wrong; one line per problem.
    """
    values = plain_values(read_yaml(path), str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values")
    if "model" in values and "grids" not in values:
        raise ConfigError(
            f"{path}: is the configuration of one run: train it with launcher/pretrain.py --config {path}, or give it "
            "as `base` of a sweep (configs/sweeps/grid.yaml shows one)"
        )
    return parse_sweep({"root": root_of(values, path), **values}, source=str(path))


def parse_sweep(values: Any, source: str) -> SweepConfig:
    """Build a sweep from nested plain values.

    Raises:
        ConfigError: names every problem, one per line, prefixed with `source`.
    """
    return parse(SweepConfig, values, source)


def _with_text_labels(values: Any) -> Any:
    """Convert the labels of a grid to text, since YAML reads the label 64 as a number."""
    return {str(label): set_ for label, set_ in values.items()} if isinstance(values, dict) else values


def _refuse_our_keys(where: str, keys: Mapping[str, Any]) -> None:
    for key in OURS:
        if key in keys:
            raise ValueError(f"{where}: {key} is set by the sweep for each cell; use its name, root and seeds")
