"""Read what a run wrote of itself, and say where it contradicts itself: nothing is computed again."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from plumbline.data.skipped import SkippedData
from plumbline.launcher.runtime.checkpoint.resume import skipped_data
from plumbline.launcher.runtime.checkpoint.store import MANIFEST, checkpoints, problems, step_of
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.run.chain import CHAIN, Read, Step, manifest_hash, read_chain
from plumbline.launcher.runtime.run.interventions import INTERVENTIONS, Intervention, read_interventions
from plumbline.launcher.runtime.run.metrics import REPORTED, read_metrics
from plumbline.launcher.runtime.run.starts import Start, as_moment, read_starts

METRICS = "metrics.jsonl"


@dataclass(frozen=True, order=True)
class Difference:
    """Say in what a run is not what it wrote."""

    step: int
    quantity: str
    """chain, checkpoint, samples, loss, grad_norm or weights."""
    text: str

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.step}: {self.quantity}: {self.text}"


@dataclass(frozen=True)
class RunRecord:
    """Hold what a run wrote."""

    folder: Path
    chain: Read
    logged: dict[int, dict[str, float]]
    """Step -> the numbers of its line in metrics.jsonl."""
    starts: list[Start]
    """In their order, and between them each return to an earlier step as another one."""
    checkpoints: list[Path]
    """Those on disk, by step."""
    skipped: SkippedData
    """Data that the run leaves out."""
    damaged: dict[int, str]
    """Step of a checkpoint whose files are not those of its manifest -> what is wrong."""

    def start_of(self, step: int) -> Start | None:
        """Return the start that made a step; None where nobody wrote it down."""
        return next((start for start in reversed(self.starts) if start.step < step), None)

    def ranks_at(self, step: int) -> int | None:
        """Return how many ranks made a step; None where nobody wrote it down."""
        start = self.start_of(step)
        return None if start is None else start.ranks

    def written(self, step: int) -> Step | None:
        """Return what a step reported, by the chain, or else by metrics.jsonl, which has no digest; None: neither."""
        logged = self.logged.get(step)
        return self.chain.steps.get(step) or (None if logged is None else Step(step, "", **logged))

    @property
    def whole(self) -> list[Path]:
        """Return the checkpoints whose files are those of their manifests, by step."""
        return [folder for folder in self.checkpoints if step_of(folder) not in self.damaged]

    @property
    def config(self) -> Config:
        """Return the configuration of the last start."""
        return load_config(self.folder / "config.yaml", [])

    def config_of(self, step: int) -> Config | None:
        """Return the configuration that made a step; None where it is not kept.

        Starts of before did not write theirs down: then it is that of the run folder, or of a checkpoint, if none of
        the starts between changed what is trained.
        """
        start = self.start_of(step)
        if start is not None and start.config is not None:
            return start.config
        if start is None or start.training == self.starts[-1].training:
            return self.config
        for folder in self.whole:
            its = self.start_of(step_of(folder))
            if its is not None and its.training == start.training:
                return load_config(folder / "config.yaml", [])
        return None

    def trained_alike(self, first: int, last: int) -> int:
        """Return the last step, up to `last`, before which no start has changed what is trained since `first` + 1."""
        made = self.start_of(first + 1)
        for step in sorted({start.step for start in self.starts if first < start.step < last}):
            its = self.start_of(step + 1)
            if made is not None and its is not None and its.training != made.training:
                return step
        return last


def read_record(folder: Path, contents: bool = False) -> RunRecord:
    """Read what a run wrote, and look whether its checkpoints are whole.

    Args:
        folder: of the run.
        contents: compare the files of checkpoints with their checksums, which takes as long as reading them.

    Raises:
        ValueError: the folder is no run, or of a version that kept no chain; a file is damaged.
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
    there = list(reversed(checkpoints(folder / "checkpoints")))
    damaged = {step_of(each): found[0] for each in there if (found := problems(each, contents))}
    whole = [each for each in there if step_of(each) not in damaged]
    skipped = skipped_data(folder, whole[-1] if whole else None)
    starts = _in_time(read_starts(folder), read_interventions(folder), folder)
    return RunRecord(folder, read_chain(folder / CHAIN), logged, starts, there, skipped, damaged)


def _in_time(starts: Iterable[Start], returns: Iterable[Intervention], folder: Path) -> list[Start]:
    """Return all starts, and each return to an earlier step as a start of those ranks that went back."""
    starts = list(starts)
    # Starts stay in the order of their lines, also where the clock of one host is ahead of that of a later one
    latest = [*accumulate((start.time for start in reversed(starts)), min)]
    moments: list[tuple[datetime, Start | Intervention]] = list(zip(reversed(latest), starts, strict=True))
    moments += [(as_moment(made.time, str(folder / INTERVENTIONS)), made) for made in returns]
    found: list[Start] = []
    for _, event in sorted(moments, key=lambda moment: moment[0]):
        if isinstance(event, Start):
            found.append(event)
        elif found:  # what was copied from another run is from before the first start of this one
            found.append(replace(found[-1], step=event.back_to))
    return found


def contradictions(record: RunRecord) -> list[Difference]:
    """Return where chain, metrics.jsonl and checkpoints contradict each other, by step."""
    found = [Difference(step, "chain", f"{CHAIN}, {text}") for step, text in record.chain.problems]
    return sorted([*found, *_of_metrics(record), *_of_checkpoints(record)])


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
        elif step >= first and folder != record.checkpoints[-1]:  # the newest is noted when training saves again
            yield Difference(step, "checkpoint", f"{CHAIN} does not name {folder}")


def same(one: float, other: float) -> bool:
    """Return whether two numbers are the same to the last bit, or both none."""
    return one == other or (math.isnan(one) and math.isnan(other))
