"""Read what a run wrote of itself, and say where it contradicts itself: nothing is computed again."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plumbline.data.skipped import SkippedData
from plumbline.launcher.runtime.checkpoint.resume import skipped_data
from plumbline.launcher.runtime.checkpoint.store import MANIFEST, checkpoints, problems, step_of
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.run.chain import CHAIN, Read, Step, manifest_hash, read_chain
from plumbline.launcher.runtime.run.metrics import REPORTED, read_metrics
from plumbline.launcher.runtime.run.starts import read_ranks

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
    ranks: list[tuple[int, int]]
    """Step that each start went on from, and its number of ranks, in the order of starts."""
    checkpoints: list[Path]
    """Those on disk, by step."""
    skipped: SkippedData
    """Data that the run leaves out."""
    damaged: dict[int, str]
    """Step of a checkpoint whose files are not those of its manifest -> what is wrong."""

    def ranks_at(self, step: int) -> int | None:
        """Return how many ranks made a step; None where nobody wrote it down."""
        return next((ranks for begun, ranks in reversed(self.ranks) if begun < step), None)

    def written(self, step: int) -> Step | None:
        """Return what a step reported, by the chain, or else by metrics.jsonl, which has no digest; None: neither."""
        logged = self.logged.get(step)
        return self.chain.steps.get(step) or (None if logged is None else Step(step, "", **logged))

    def config_at(self, checkpoint: int | None) -> Config:
        """Return the configuration of the ranks that wrote a checkpoint; None: of the last start."""
        folders = [self.folder, *(folder for folder in self.checkpoints if step_of(folder) == checkpoint)]
        return load_config(folders[-1] / "config.yaml", [])


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
    return RunRecord(folder, read_chain(folder / CHAIN), logged, read_ranks(folder), there, skipped, damaged)


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
