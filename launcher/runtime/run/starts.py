"""Keep the history of a run: a line in starts.jsonl for each start, with its configuration and what changed in it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from plumbline.data.damage import DamagedFileError
from plumbline.data.disk import is_there
from plumbline.launcher.runtime.config.identity import changes, makes_other_steps
from plumbline.launcher.runtime.config.load import config_in
from plumbline.launcher.runtime.config.resolve import resolve
from plumbline.launcher.runtime.config.run_files import CONFIG
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.system.files import read_json_lines, read_key, remove_leftovers, write_json_lines
from plumbline.launcher.runtime.system.log import LOG

STARTS = "starts.jsonl"
TOLD = ("command", "host", "world_size", "slurm_job_id", "python", "packages", "git_commit", "git_dirty")
"""Facts of environment.json that each line has, since that file describes only the newest start."""
ALWAYS_NEW = ("command", "slurm_job_id", "memory_bytes")
"""Facts that change at every start."""


@dataclass(frozen=True)
class Start:
    """Describe one start of a run: from which step, when, and with which configuration."""

    time: datetime
    step: int
    """Step from which it started."""
    ranks: int
    config: Config | None
    """Its configuration, or None if it was not recorded or is not valid in this version."""
    training: int
    """Number of starts so far that changed a key with an effect on training steps."""


def read_starts(folder: Path) -> Iterator[Start]:
    """Yield the starts of a run, in order; older runs have no list.

    Raises:
        DamagedFileError: a line is not a start.
    """
    path, training = folder / STARTS, 0
    for number, line in read_json_lines(path) if is_there(path) else ():
        place = f"{path}, line {number}"
        changed = line.get("changes")
        training += isinstance(changed, dict) and any(map(makes_other_steps, changed))
        yield Start(
            as_moment(read_key(line, "time", str, place), place),
            read_key(line, "step", int, place),
            read_key(line, "world_size", int, place),
            _config(line.get("config"), place),
            training,
        )


def as_moment(text: Any, place: str) -> datetime:
    """Parse a time in ISO 8601.

    Raises:
        DamagedFileError: it is not a time; names the place.
    """
    try:
        return datetime.fromisoformat(text).astimezone()
    except (TypeError, ValueError) as error:
        raise DamagedFileError(f"{place}: time = {text!r}: expected a time like 2026-01-31T12:00:00+00:00") from error


def _config(values: Any, place: str) -> Config | None:
    try:
        return resolve(values, place) if isinstance(values, dict) else None
    except ValueError:
        return None


def note_start(config: Config, facts: Mapping[str, Any], step: int) -> None:
    """Add the line of this start, while config.yaml and environment.json are still those of the previous start.

    Args:
        config: the run.
        facts: the future contents of environment.json.
        step: step from which training starts.
    """
    path = config.run.folder / STARTS
    remove_leftovers(path)
    try:
        earlier = [line for _, line in read_json_lines(path)] if is_there(path) else []
    except ValueError as error:
        path.replace(path.with_name(f"{STARTS}.damaged"))
        LOG.warning(f"earlier starts of this run are not listed: {error}; kept as {STARTS}.damaged")
        earlier = []
    line = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "step": step,
        **{key: facts[key] for key in TOLD},
        "changes": _changes(config, facts),
        "config": config.model_dump(mode="json"),
    }
    write_json_lines(path, [*earlier, line])


def _changes(config: Config, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return key -> its values at the previous start and now, or None if there is none or it is unknown."""
    folder = config.run.folder
    if not (folder / CONFIG).exists():
        return None
    try:
        old = _flat(json.loads((folder / "environment.json").read_text(encoding="utf-8")))
        changed: dict[str, Any] = changes(config_in(folder), config)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # or JSON that says something else
        LOG.warning(f"what changed since the start before is not known: {error}")
        return None
    new = _flat(facts)
    return changed | {key: (old.get(key), value) for key, value in new.items() if old.get(key) != value}


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    packages = {f"packages.{name}": version for name, version in facts["packages"].items()}
    return {key: value for key, value in facts.items() if key not in (*ALWAYS_NEW, "packages")} | packages
