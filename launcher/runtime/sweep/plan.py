"""Plan a sweep: its cells and the runs to make, in order. Job arrays work on a saved plan.

A job may wait for days: later edits of the files do not affect it, and every task uses the same list.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.parse import parse
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.sweep.cells import Cell, distinct, expand
from plumbline.launcher.runtime.sweep.config import SweepConfig, load_sweep, parse_sweep
from plumbline.launcher.runtime.sweep.result import RunOutcome, read_rows
from plumbline.launcher.runtime.sweep.results import describe
from plumbline.launcher.runtime.sweep.worker import FINISHED, outcome_of


@dataclass(frozen=True)
class Plan:
    """Hold a checked sweep."""

    sweep: SweepConfig
    cells: list[Cell]
    """Cells of all seeds of the sweep."""
    runs: list[Cell]
    """One cell per run to make, longest first."""

    elsewhere: Mapping[str, RunOutcome] = field(default_factory=dict)
    """Signature -> outcome of runs made on another machine."""

    def unfinished(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells whose run is not finished, here or elsewhere."""
        return [
            cell for cell in cells if cell.signature not in self.elsewhere and outcome_of(cell.config) not in FINISHED
        ]


def make_plan(path: Path, overrides: list[str], seeds: list[int] | None = None, rows: Path | None = None) -> Plan:
    """Read a sweep's file and check everything in it.

    Args:
        path: the sweep's file.
        overrides: `section.key=value` for all cells.
        seeds: only make runs of these seeds.
        rows: results.jsonl of the same sweep from another machine.

    Raises:
        ValueError: the sweep, a cell's configuration or a corpus cannot be used, it has no such seed, or the rows
            belong to another sweep.
    """
    sweep = load_sweep(path)
    seeds = sweep.seeds if seeds is None else seeds
    if not set(seeds) <= set(sweep.seeds):
        raise ConfigError(f"--seeds {','.join(map(str, seeds))}: {path} has the seeds {sweep.seeds}")
    cells = expand(sweep, path.parent / sweep.base, overrides)
    sweep.how.check(sweep.settings, [describe(cell) for cell in cells])
    runs = distinct([cell for cell in cells if cell.config.run.seed in seeds])
    return Plan(sweep, cells, runs, {} if rows is None else _finished_in(rows, cells))


def _finished_in(rows: Path, cells: Sequence[Cell]) -> dict[str, RunOutcome]:
    """Return signature -> outcome of the finished runs in rows."""
    finished = {row.signature: row.outcome for row in read_rows(rows) if row.outcome.status in FINISHED}
    strangers = finished.keys() - {cell.signature for cell in cells}
    if strangers:
        raise ConfigError(
            f"{rows}: {len(strangers)} of its {len(finished)} finished runs are none of this sweep's: other settings, "
            "another corpus or other seeds; give the same ones, or leave out --rows"
        )
    return finished


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan, with every configuration resolved."""
    document = {
        "sweep": plan.sweep.model_dump(),
        "cells": [{"labels": cell.labels, "config": cell.config.model_dump()} for cell in plan.cells],
        "runs": [cell.signature for cell in plan.runs],
    }
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def load_plan(path: Path) -> Plan:
    """Read a plan written by `save_plan`.

    Raises:
        ConfigError: it cannot be read, or is from a different version.
        OSError: the disk cannot read it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        given = [(cell["labels"], cell["config"]) for cell in document["cells"]]
        sweep, runs = document["sweep"], document["runs"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read as the plan of a sweep: {error}") from error
    cells = [Cell(labels, parse(Config, config, str(path))) for labels, config in given]
    first = {cell.signature: cell for cell in reversed(cells)}
    return Plan(parse_sweep(sweep, str(path)), cells, [first[signature] for signature in runs])
