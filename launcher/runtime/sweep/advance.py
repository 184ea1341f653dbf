"""Report how much of a task's share of a sweep is saved, without importing torch.

The job script calls this before and after each attempt, the second time perhaps in the few seconds that Slurm leaves.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbline.data.disk import is_file
from plumbline.launcher.runtime.checkpoint.newest import newest_step
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.yaml_files import read_yaml
from plumbline.launcher.runtime.run.status_file import RESULT
from plumbline.launcher.runtime.sweep.root import root_of

DIVERGED = "diverged.json"
ENDINGS = (RESULT, DIVERGED)
"""Files of which a run that is never trained again has one."""


def one_of_several(text: str) -> tuple[int, int]:
    """Parse I/N with 0 <= I < N, for argparse."""
    first, _, step = text.partition("/")
    if not (first.isdigit() and step.isdigit() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with 0 <= I < N, for example 0/4")
    return int(first), int(step)


@dataclass(frozen=True)
class Share:
    """Hold the runs of one task of a sweep."""

    folder: Path
    """The sweep's folder."""
    name: str
    runs: Callable[[], list[Path]]
    """Returns their folders."""

    def saved(self) -> tuple[int, int]:
        """Return the number of finished runs, and the sum of the steps that the others have saved."""
        runs = self.runs()
        finished = [run for run in runs if any(is_file(run / name) for name in ENDINGS)]
        return len(finished), sum(newest_step(run) for run in runs if run not in finished)


def read_share(config: Path | None, plan: Path | None, first: int, step: int) -> Share:
    """Return every `step`-th run of a plan starting at `first`, or all existing runs of a sweep's file.

    Raises:
        ConfigError: the file cannot be read as a plan or sweep.
        OSError: the disk cannot read it.
    """
    name = f"{first}-of-{step}"
    if plan is None:
        assert config is not None, "one of the two is given"
        folder = _folder(read_yaml(config), config)
        return Share(folder, name, lambda: sorted((folder / "runs").glob("*")))
    try:
        document = json.loads(plan.read_text(encoding="utf-8"))
        sweep, signatures = document["sweep"], document["runs"][first::step]
    except (FileNotFoundError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{plan}: cannot be read as the plan of a sweep: {error}") from error
    folder = _folder(sweep, plan)
    runs = [folder / "runs" / signature for signature in signatures]
    return Share(folder, name, lambda: runs)


def _folder(sweep: Any, file: Path) -> Path:
    """Return the folder of a sweep as `SweepConfig.folder` does, from unchecked values."""
    if "name" not in sweep:
        raise ConfigError(f"{file}: name: not given; a sweep has one")
    return Path(root_of(sweep, file), str(sweep["name"]))
