"""Keep account of what was done to a run on its way: interventions.jsonl, a line for each time that it went back.

The file is what counts: it is written before training goes on, so a run that is killed right afterwards, before its
next checkpoint, leaves out the same data when it resumes. A run that is begun anew in the same folder, or in one into
which the file was copied, leaves it out from the start, and writes the same numbers.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plumbline.data.damage import DamagedFileError
from plumbline.data.skipped import SkippedData, Window
from plumbline.launcher.runtime.system.files import from_keys, read_json_lines, remove_leftovers, write_json_lines

INTERVENTIONS = "interventions.jsonl"


@dataclass(frozen=True)
class Intervention:
    """Say that a run went back to a checkpoint, and why."""

    time: str
    """ISO 8601, with the zone of rank 0's machine."""
    guard: str
    """What asked for it: the key of its section in `guards`."""
    message: str
    """What it saw."""
    first_step: int
    """First step that is not trusted, as metrics.jsonl counted when it was made."""
    last_step: int
    back_to: int
    """Step of the checkpoint."""
    skipped: Window
    """[first, stop) of the data steps that are left out from there on, counted from 0."""

    def __str__(self) -> str:
        """Return it in one line."""
        return (
            f"step {self.last_step}: {self.guard}: {self.message}; went back to step {self.back_to}, without the data "
            f"of steps {self.first_step} to {self.last_step}"
        )


def read_interventions(folder: Path) -> list[Intervention]:
    """Return what was done to the run in a folder, in order.

    Raises:
        DamagedFileError: a line holds something else.
    """
    path = folder / INTERVENTIONS
    if not path.exists():
        return []
    return [_parse(item, f"{path}, line {number}") for number, item in read_json_lines(path)]


def write_interventions(folder: Path, made: list[Intervention]) -> None:
    """Write what was done to a run: the lines of before, and one more."""
    remove_leftovers(folder / INTERVENTIONS)
    write_json_lines(folder / INTERVENTIONS, [asdict(each) for each in made])


def skipped_in(made: list[Intervention]) -> SkippedData:
    """Return the data that is left out."""
    return SkippedData.of(each.skipped for each in made)


def _parse(item: dict[str, Any], place: str) -> Intervention:
    try:
        (window,) = SkippedData.from_json([item["skipped"]]).windows
        return from_keys(Intervention, {**item, "skipped": window})
    except (KeyError, ValueError) as error:
        raise DamagedFileError(f"{place}: no intervention ({error}); correct or remove the line") from error
