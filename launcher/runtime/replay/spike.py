"""Say which samples of a step made its spike, and prove it by the same steps without them."""

from collections.abc import Sequence
from dataclasses import dataclass

from plumbline.data.streams import IGNORED
from plumbline.launcher.runtime.checkpoint.store import step_of
from plumbline.launcher.runtime.replay.record import Difference, RunRecord
from plumbline.launcher.runtime.replay.search import AROUND, Found, Usual, search, usual
from plumbline.launcher.runtime.replay.steps import Replay, Stash, without
from plumbline.launcher.runtime.replay.windows import Window, compare, tolerance_of
from plumbline.launcher.runtime.run.chain import Step
from plumbline.launcher.runtime.system.collectives import gather_objects
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.world import World
from plumbline.model.objectives.objective import Batch

AFTER = 8
"""Steps behind the spike that are made without its causes."""


@dataclass(frozen=True)
class Standing:
    """Say how a number of a step stands among those of the steps around."""

    quantity: str
    """grad_norm or loss."""
    value: float
    usual: Usual

    @property
    def is_spike(self) -> bool:
        """Return whether it is out of the usual range."""
        return not self.usual.has(self.value)

    def carries(self, part: Step, share: float) -> bool:
        """Return whether some samples carry a spike.

        What a mean over all labels owes to these samples is their own mean times their share of the labels: a half of
        an ordinary batch has a gradient that is shorter, by this measure, than that of an ordinary batch.

        Args:
            part: the step on these samples alone.
            share: of all labels of the step, how many are theirs.
        """
        if self.quantity == "grad_norm":
            return not part.grad_norm * share <= self.usual.median
        return not (part.loss - self.usual.median) * share <= (self.usual.limit - self.usual.median) / 2


@dataclass(frozen=True)
class Explanation:
    """Say which samples made a spike."""

    window: Window
    """The steps that were made again ahead of it."""
    tolerance: float | None
    difference: Difference | None
    """The first of these steps, or the step itself, that is not as the run wrote it."""
    found: Found
    proof: list[Step]
    """The step and those behind it without the causes."""


def standings(record: RunRecord, step: int) -> list[Standing]:
    """Return how gradient norm and loss of a step stand among those of the steps around.

    Raises:
        ValueError: the step was not written down, or too few around it.
    """
    its = record.written(step)
    if its is None:
        raise ValueError(f"--step {step}: neither chain.jsonl nor metrics.jsonl of {record.folder} has this step")
    around = [at for at in range(step - AROUND, step + AROUND + 1) if at != step]
    known = [found for at in around if (found := record.written(at)) is not None]
    try:
        return [
            Standing(key, getattr(its, key), usual([getattr(found, key) for found in known]))
            for key in ("grad_norm", "loss")
        ]
    except ValueError as error:
        raise ValueError(f"--step {step}: {error}; give a step of a longer run") from error


def explain(record: RunRecord, spike: Standing, step: int, world: World) -> Explanation:
    """Find the causes of a spike, and make the steps again without them. Collective.

    Raises:
        ValueError: the checkpoint before cannot be used.
    """
    begin = next((folder for folder in reversed(record.whole) if step_of(folder) < step), None)
    config = record.config_of(step) or record.config
    window = Window(0 if begin is None else step_of(begin), step - 1, begin, None, config)
    tolerance = tolerance_of(record, window, config, world)
    replay = Replay(config, record.skipped, world)
    replay.go_to(begin)
    difference = _make_until(record, replay, step - 1, tolerance)
    stash, batches = Stash(replay), replay.batches()
    labels = _labels(batches, world)

    def make(samples: Sequence[int]) -> Step:
        """Make the step on these samples of it alone."""
        stash.restore()
        return replay.make(without(batches, labels.keys() - set(samples)))

    def value(samples: Sequence[int]) -> float:
        """Return the number that spiked, on these samples."""
        made = make(samples)
        LOG.info(f"step {step} on {len(samples)} of {len(labels)} samples: {spike.quantity} "
                 f"{getattr(made, spike.quantity):.4g}")  # fmt: skip
        return float(getattr(made, spike.quantity))

    def carries(samples: Sequence[int]) -> bool:
        """Return whether these samples carry a spike."""
        share = sum(labels[sample] for sample in samples) / sum(labels.values())
        return spike.carries(make(samples), share)

    written = record.written(step)
    if difference is None and written is not None:
        difference = compare(make(list(labels)), written, tolerance)
    found = search(list(labels), spike.value, value, carries, spike.usual)
    proof = [make([sample for sample in labels if sample not in found.causes])]
    while replay.step < step + AFTER and record.written(replay.step + 1) is not None:
        proof.append(replay.make(replay.batches()))
    return Explanation(window, tolerance, difference, found, proof)


def _make_until(record: RunRecord, replay: Replay, last: int, tolerance: float | None) -> Difference | None:
    """Make all steps up to one, and return the first that is not as written."""
    first: Difference | None = None
    while replay.step < last:
        made = replay.make(replay.batches())
        written = record.written(made.step)
        if first is None and written is not None:
            first = compare(made, written, tolerance)
    return first


def _labels(batches: Sequence[Batch], world: World) -> dict[int, int]:
    """Return number -> labels of each sample of a step, of all ranks, by number."""
    mine = {
        int(number): int((labels != IGNORED).sum())
        for batch in batches
        for number, labels in zip(batch["sample_index"], batch["labels"], strict=True)
    }
    return dict(sorted(item for share in gather_objects(mine, world) for item in share.items()))
