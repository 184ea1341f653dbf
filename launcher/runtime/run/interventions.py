"""Record the rollbacks of a run in interventions.jsonl, one line for each.

The file is authoritative: it is written before training goes on, so a run that is killed before its next checkpoint
skips the same data when it resumes. A run that is restarted from scratch in the same folder, or in one to which the
file was copied, skips the data from the start, and writes the same numbers.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plumbline.data.damage import DamagedFileError
from plumbline.data.disk import is_there
from plumbline.data.skipped import SkippedData, StepRange
from plumbline.launcher.runtime.system.files import from_keys, read_json_lines, remove_leftovers, write_json_lines

INTERVENTIONS = "interventions.jsonl"


@dataclass(frozen=True)
class Intervention:
    """Describe one rollback to a checkpoint, and its reason."""

    time: str
    """ISO 8601, with the zone of rank 0's machine."""
    guard: str
    """Guard that requested it: the key of its section in `guards`."""
    message: str
    """What the guard found."""
    first_step: int
    """First step that is not trusted, by the count of metrics.jsonl at the time."""
    last_step: int
    back_to: int
    """Step of the checkpoint."""
    skipped: StepRange
    """[first, stop) of the data steps that are skipped from then on, counted from 0."""

    def __str__(self) -> str:
        """Return a description in one line."""
        return (
            f"step {self.last_step}: {self.guard}: {self.message}; went back to step {self.back_to}, without the data "
            f"of steps {self.first_step} to {self.last_step}"
        )


def read_interventions(folder: Path) -> list[Intervention]:
    """Return the interventions of the run in a folder, in order.

    Raises:
        DamagedFileError: a line is not an intervention.
    """
    path = folder / INTERVENTIONS
    if not is_there(path):
        return []
    return [_parse(item, f"{path}, line {number}") for number, item in read_json_lines(path)]


def went_back_past(folder: Path, step: int) -> bool:
    """Return whether a run went back from a step or beyond it to one before it; False if its record is damaged."""
    try:
        return any(each.back_to < step <= each.last_step for each in read_interventions(folder))
    except DamagedFileError:  # the next attempt names it
        return False


def write_interventions(folder: Path, made: list[Intervention]) -> None:
    """Write all interventions of a run: the earlier ones and the new one."""
    remove_leftovers(folder / INTERVENTIONS)
    write_json_lines(folder / INTERVENTIONS, [asdict(each) for each in made])


def skipped_in(made: list[Intervention]) -> SkippedData:
    """Return the data that interventions skip."""
    return SkippedData.of(each.skipped for each in made)


def _parse(item: dict[str, Any], place: str) -> Intervention:
    try:
        (skipped,) = SkippedData.from_json([item["skipped"]]).ranges
        return from_keys(Intervention, {**item, "skipped": skipped})
    except (KeyError, ValueError) as error:
        raise DamagedFileError(f"{place}: no intervention ({error}); correct or remove the line") from error
