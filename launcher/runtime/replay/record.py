"""Read what a run wrote, and find contradictions in it without recomputing anything."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from plumbline.data.skipped import SkippedData
from plumbline.launcher.runtime.checkpoint.resume import skipped_data
from plumbline.launcher.runtime.checkpoint.store import MANIFEST, checkpoints, problems, step_of
from plumbline.launcher.runtime.config.load import config_in
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS, METRICS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.run.chain import CHAIN, Read, Step, manifest_hash, read_chain
from plumbline.launcher.runtime.run.interventions import INTERVENTIONS, Intervention, read_interventions
from plumbline.launcher.runtime.run.metrics import REPORTED, read_metrics
from plumbline.launcher.runtime.run.starts import Start, as_moment, read_starts


@dataclass(frozen=True, order=True)
class Difference:
    """Describe a difference between a run and what it wrote."""

    step: int
    quantity: str
    """chain, checkpoint, samples, loss, grad_norm or weights."""
    text: str

    def __str__(self) -> str:
        """Describe the difference in words."""
        return f"{self.step}: {self.quantity}: {self.text}"


@dataclass(frozen=True)
class RunRecord:
    """Hold what a run wrote."""

    folder: Path
    chain: Read
    logged: dict[int, dict[str, float]]
    """Step -> the numbers of its line in metrics.jsonl."""
    starts: list[Start]
    """In order, with each return to an earlier step counted as another start."""
    checkpoints: list[Path]
    """Those on disk, by step."""
    skipped: SkippedData
    """Data that the run leaves out."""
    damaged: dict[int, str]
    """Step of a checkpoint whose files do not match its manifest -> what is wrong."""

    def start_of(self, step: int) -> Start | None:
        """Return the start that made a step, or None if it was not recorded."""
        return next((start for start in reversed(self.starts) if start.step < step), None)

    def ranks_at(self, step: int) -> int | None:
        """Return how many ranks made a step, or None if it was not recorded."""
        start = self.start_of(step)
        return None if start is None else start.ranks

    def written(self, step: int) -> Step | None:
        """Return what a step reported according to the chain, else metrics.jsonl (which has no digest), or None."""
        logged = self.logged.get(step)
        return self.chain.steps.get(step) or (None if logged is None else Step(step, "", **logged))

    @property
    def whole(self) -> list[Path]:
        """Return the checkpoints whose files match their manifests, by step."""
        return [folder for folder in self.checkpoints if step_of(folder) not in self.damaged]

    @property
    def config(self) -> Config:
        """Return the configuration of the last start."""
        return config_in(self.folder)

    def config_of(self, step: int) -> Config | None:
        """Return the configuration that made a step, or None if it was not kept.

        Older versions did not record it at each start: then it is taken from the run folder or a checkpoint, if no
        start in between changed what is trained.
        """
        start = self.start_of(step)
        if start is not None and start.config is not None:
            return start.config
        if start is None or start.training == self.starts[-1].training:
            return self.config
        for folder in self.whole:
            its = self.start_of(step_of(folder))
            if its is not None and its.training == start.training:
                return config_in(folder)
        return None

    def trained_alike(self, first: int, last: int) -> int:
        """Return the last step, up to `last`, such that no start since step `first` + 1 has changed what is trained."""
        made = self.start_of(first + 1)
        for step in sorted({start.step for start in self.starts if first < start.step < last}):
            its = self.start_of(step + 1)
            if made is not None and its is not None and its.training != made.training:
                return step
        return last


def read_record(folder: Path, contents: bool = False) -> RunRecord:
    """Read what a run wrote, and check whether its checkpoints are whole.

    Args:
        folder: the run folder.
        contents: compare the files of checkpoints with their checksums, which reads them completely.

    Raises:
        ValueError: the folder is not a run, or from a version without a chain, or a file is damaged.
    """
    if not (folder / CHAIN).is_file():
        raise ValueError(
            f"{folder / CHAIN}: not there: this is no run folder, or the run was made before runs kept a chain, and "
            "nothing can be checked"
        )
    logged = {
        step: {key: float(record[key]) for key in REPORTED}
        for step, record in read_metrics(folder / METRICS)
        if all(key in record for key in REPORTED)
    }
    there = list(reversed(checkpoints(folder / CHECKPOINTS)))
    damaged = {step_of(each): found[0] for each in there if (found := problems(each, contents))}
    whole = [each for each in there if step_of(each) not in damaged]
    skipped = skipped_data(folder, whole[-1] if whole else None)
    starts = _in_time(read_starts(folder), read_interventions(folder), folder)
    return RunRecord(folder, read_chain(folder / CHAIN), logged, starts, there, skipped, damaged)


def _in_time(starts: Iterable[Start], returns: Iterable[Intervention], folder: Path) -> list[Start]:
    """Return all starts, with each return to an earlier step as a start of the ranks that went back."""
    starts = list(starts)
    # Starts stay in the order of their lines, even if one host's clock is ahead of a later one's
    latest = [*accumulate((start.time for start in reversed(starts)), min)]
    moments: list[tuple[datetime, Start | Intervention]] = list(zip(reversed(latest), starts, strict=True))
    moments += [(as_moment(made.time, str(folder / INTERVENTIONS)), made) for made in returns]
    found: list[Start] = []
    for _, event in sorted(moments, key=lambda moment: moment[0]):
        if isinstance(event, Start):
            found.append(event)
        elif found:  # entries copied from another run are older than the first start of this one
            found.append(replace(found[-1], step=event.back_to))
    return found


def contradictions(record: RunRecord) -> list[Difference]:
    """Return where chain, metrics.jsonl and checkpoints contradict each other, by step."""
    found = [Difference(step, "chain", f"{CHAIN}, {text}") for step, text in record.chain.problems]
    return sorted([*found, *_of_beginning(record), *_of_metrics(record), *_of_checkpoints(record)])


def _of_beginning(record: RunRecord) -> Iterator[Difference]:
    begun = 1 + min((start.step for start in record.starts), default=0)
    first = min(record.chain.steps, default=begun)
    if first > begun:
        yield Difference(begun, "chain", f"{CHAIN} begins at step {first}, and the run at step {begun}")


def _of_metrics(record: RunRecord) -> Iterator[Difference]:
    first = min(record.chain.steps, default=0)
    last = max(record.chain.steps, default=0)
    for step, numbers in record.logged.items():
        if step not in record.chain.steps:
            if first <= step <= last:
                yield Difference(step, "chain", f"{CHAIN} has no line of this step, which {METRICS} has")
            continue
        for key in REPORTED:
            bound = getattr(record.chain.steps[step], key)
            if not same(numbers[key], bound):
                yield Difference(step, key, f"{numbers[key]!r} in {METRICS}, {bound!r} in {CHAIN}")


def _of_checkpoints(record: RunRecord) -> Iterator[Difference]:
    chain = record.chain
    first, last = min(chain.steps, default=0), max(chain.steps, default=0)
    for folder in record.checkpoints:
        step = step_of(folder)
        if step in record.damaged:
            yield Difference(step, "checkpoint", f"{folder}: {record.damaged[step]}")
        elif step > last:
            yield Difference(step, "chain", f"{CHAIN} ends at step {last}, and {folder} is there")
        elif step in chain.checkpoints:
            if manifest_hash(folder / MANIFEST) != chain.checkpoints[step]:
                yield Difference(step, "checkpoint", f"{folder / MANIFEST} is not the one that {CHAIN} names")
        elif step >= first and folder != record.checkpoints[-1]:  # the newest is recorded at the next save
            yield Difference(step, "checkpoint", f"{CHAIN} does not name {folder}")


def same(one: float, other: float) -> bool:
    """Return whether two numbers are bitwise equal, or both nan."""
    return one == other or (math.isnan(one) and math.isnan(other))
