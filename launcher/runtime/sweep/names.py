"""Record which cells the runs of a sweep are, whose folders are named by hashes. Nothing here imports torch."""

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from plumbline.launcher.runtime.system.files import write_json

CELLS = "cells.json"
"""File in the sweep's folder: name of a run folder -> labels and seed of each cell that the run is."""


def write_names(folder: Path, cells: Iterable[tuple[str, str]]) -> None:
    """Add cells to those that are recorded of a sweep.

    Args:
        folder: the sweep's folder.
        cells: signature and description of each.
    """
    names = {run: list(known) for run, known in _read_names(folder).items()}
    for signature, text in cells:
        known = names.setdefault(signature, [])
        if text not in known:
            known.append(text)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CELLS, names)


def names_of(run: Path) -> list[str]:
    """Return labels and seed of each cell that a run is; none for a run outside of sweeps."""
    run = run.resolve()
    return _read_once(run.parent.parent).get(run.name, []) if run.parent.name == "runs" else []


@lru_cache(maxsize=8)
def _read_once(folder: Path) -> dict[str, list[str]]:
    return _read_names(folder)


def _read_names(folder: Path) -> dict[str, list[str]]:
    """Return the record of a sweep; nothing if there is none, or it is damaged: it only helps people."""
    try:
        names = json.loads((folder / CELLS).read_text(encoding="utf-8"))
        return {run: list(map(str, cells)) for run, cells in names.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}
