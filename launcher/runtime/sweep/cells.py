"""Make the cells of a sweep, and detect when two of them are the same run.

A cell is one point of a grid: its labels, its seed and its resolved configuration. It is trained in a run folder named
by its *signature*: a hash of everything that determines the numbers. The parameterization enters by its effect (what it
decides for every tensor), not by its name, so at the base size, where all rules coincide bitwise, their cells share one
run.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.identity import TRAINED, mark_of
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import last_step, plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.yaml_files import escape
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs, open_inputs
from plumbline.launcher.runtime.sweep.config import OURS, GridConfig, SweepConfig, Values, axis_keys
from plumbline.launcher.runtime.sweep.kinds import Kind
from plumbline.launcher.runtime.sweep.result import Label
from plumbline.launcher.runtime.system.files import key_of
from plumbline.launcher.runtime.train.checks import open_checked
from plumbline.model.flops import training_flops_per_token
from plumbline.model.parameterization.multipliers import multipliers

NOT_AS_WRITTEN = {"parameterization", "horizon", "run"}
"""Not hashed as written: `_effect`, the seed and REPEATS count instead."""
REPEATS = {"deterministic", "reproducible"}
HASHED_TOO = {"data.micro_batch_size"}  # it only changes the last bits, but cells are compared bitwise


@dataclass(frozen=True)
class Cell:
    """Hold one point of a grid and one seed."""

    labels: dict[str, Label]
    """Axis -> label, or value if the axis is a config key."""
    config: Config
    """Configuration of the cell, with run.name the signature and run.root the sweep's folder of runs."""

    @property
    def signature(self) -> str:
        """Return the identity of the run; cells with the same signature share it."""
        return self.config.run.name

    @property
    def flops(self) -> float:
        """Return the training FLOPs, used to order cells and to estimate the time left."""
        config = self.config
        per_token = training_flops_per_token(config.model, config.data.sequence_length, config.objective)
        return per_token * last_step(config) * config.data.batch_plan.tokens_per_step

    def __str__(self) -> str:
        """Describe the cell: rule=sp size=w64 optimizer.lr=0.001 seed=1."""
        return _text({**self.labels, "seed": self.config.run.seed})


def expand(sweep: SweepConfig, base: Path, overrides: list[str]) -> list[Cell]:
    """Return every cell once, in the order of the file, with its configuration and corpora checked.

    Args:
        sweep: the sweep.
        base: path of its base file.
        overrides: `section.key=value` for all cells, on top of `set`.

    Raises:
        ValueError: a configuration or a corpus cannot be used (names the cell), or grids use the same labels for
            different runs.
    """
    root = str(sweep.folder / "runs")
    cells: dict[str, Cell] = {}  # labels and seed -> cell
    for grid in sweep.grids:
        _check_overrides(overrides, grid)
        for labels, values in _points(grid):
            given = [*_as_overrides({**sweep.set, "run.name": "cell"}), *overrides, *_as_overrides(values)]
            try:
                config = load_config(base, _outer_first(given))
                corpora = _open(config, sweep.how).fingerprints
            except ValueError as error:
                raise ConfigError(f"cell {_text(labels)}: {error}") from error
            facts: dict[str, Any] = {"effect": _effect(config), "corpora": corpora}
            if not sweep.how.whole_runs:
                facts["kind"] = sweep.kind
            for seed in sweep.seeds:
                name = _signature(config, {**facts, "seed": seed})
                run = config.run.model_copy(update={"name": name, "root": root, "seed": seed})
                cell = Cell(labels, config.model_copy(update={"run": run}))
                first = cells.setdefault(json.dumps([labels, seed], sort_keys=True), cell)
                if first.signature != cell.signature:
                    raise ConfigError(
                        f"cell {cell}: two grids make different runs of these labels, which would count as seeds of "
                        "one; give each run a label of its own, or make a sweep of each grid"
                    )
    return list(cells.values())


def distinct(cells: Sequence[Cell]) -> list[Cell]:
    """Return one cell per run, longest first, so that no long one is left for the end."""
    first = {cell.signature: cell for cell in reversed(cells)}
    return sorted(first.values(), key=lambda cell: (-cell.flops, cell.signature))


def _points(grid: GridConfig) -> Iterator[tuple[dict[str, Label], Values]]:
    """Yield labels and values of each point of the product of the axes."""
    choices: list[list[tuple[Label, Values]]] = [
        [(value, {axis: value}) for value in values] if isinstance(values, list) else list(values.items())
        for axis, values in grid.axes.items()
    ]
    for chosen in product(*choices):
        labels = dict(zip(grid.axes, (label for label, _ in chosen), strict=True))
        yield labels, {key: value for _, values in chosen for key, value in values.items()}


def _text(labels: dict[str, Label]) -> str:
    return " ".join(f"{axis}={label}" for axis, label in labels.items())


def _open(config: Config, how: Kind[Any]) -> Inputs:
    """Return what a cell reads, after the checks with which its run would start."""
    alone = World(0, 0, 1, torch.device("cpu"))
    branch = config.schedule.branch
    if branch is not None and branch.from_step is None:
        raise ConfigError(
            f"schedule.branch.checkpoint = {branch.checkpoint}: a sweep does not look for the newest checkpoint of a "
            "run, which may change while it trains: start each branch by pretrain.py"
        )
    if how.whole_runs:
        return open_checked(config, plan_run(config), alone)
    inputs = open_inputs(config, alone)
    inputs.check_sizes()
    return inputs


def _as_overrides(values: Values) -> list[str]:
    """Return overrides with values written as JSON, which YAML reads unchanged.

    Raises:
        ConfigError: a key contains a value of its own, which would bypass the checks of a file's values.
    """
    for key in values:
        if "=" in str(key):
            raise ConfigError(f"{key}: not a key; a sweep's file gives keys and values, as {{optimizer.lr: 0.001}}")
    return [f"{key}={json.dumps(escape(value))}" for key, value in values.items()]


def _outer_first(overrides: list[str]) -> list[str]:
    """Return overrides sorted by depth: data.train, which replaces the list, before an axis data.train.0.weight."""
    return sorted(overrides, key=lambda override: len(re.findall(r"[.[]", override.partition("=")[0])))


def _check_overrides(overrides: list[str], grid: GridConfig) -> None:
    taken = {key: axis for axis, values in grid.axes.items() for key in axis_keys(axis, values)}
    for override in overrides:
        key = override.partition("=")[0]
        if key in taken:
            raise ConfigError(f"{override}: the axis {taken[key]} sets {key} for each cell; change the sweep's file")
        if key in OURS:
            raise ConfigError(f"{override}: {key} is set by the sweep for each cell; change the sweep's file")


def _effect(config: Config) -> dict[str, Any]:
    """Return what the scaling rules decide: for the optimizer, for every tensor, and in the forward pass.

    What has no effect on a run, such as a skip gain of 1, is left out, so that newer features do not change old
    signatures.
    """
    plan = plan_run(config)
    forward = asdict(multipliers(config.model, config.parameterization))
    if forward["skip"] == config.model.skip_gain:
        del forward["skip"]
    unused = () if config.optimizer.grad_clip_norm == "base" else ("gradient_growth",)
    return {
        "optimizer": asdict(plan.settings),
        "tensors": [{key: value for key, value in asdict(row).items() if key not in unused} for row in plan.rows],
        "forward": forward,
    }


def _determining(config: Config) -> dict[str, dict[str, Any]]:
    """Return the non-default values of the keys that determine a run as they are written."""
    determining = {}
    for section, values in config.model_dump(exclude=NOT_AS_WRITTEN, exclude_defaults=True).items():
        known = {key for key in values if mark_of(section, key) in TRAINED or f"{section}.{key}" in HASHED_TOO}
        if known or mark_of(section) in TRAINED:
            determining[section] = {key: value for key, value in values.items() if key in known}
    return determining


def _signature(config: Config, facts: dict[str, Any]) -> str:
    """Return a hash of everything that determines the run: the configuration, and what else is given as facts.

    Default values are left out, so that keys added by later versions do not change the signatures of finished runs.
    """
    determined = _determining(config)
    if "schedule" in determined:
        # By unit, as durations were once written, so that the rows of docs/results are still recognised
        for phase in ("warmup", "decay"):
            determined["schedule"].pop(phase, None)
            length = getattr(config.schedule, phase)
            determined["schedule"][f"{phase}_{length.unit}"] = length.amount
    if repeats := config.run.model_dump(include=REPEATS, exclude_defaults=True):
        determined["run"] = repeats
    return key_of({**determined, **facts})
