"""Find the samples that caused a step's spike, and prove it by repeating the steps without them."""

from collections.abc import Sequence
from dataclasses import dataclass

from plumbline.data.streams import IGNORED
from plumbline.launcher.runtime.checkpoint.store import step_of
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.replay.record import Difference, RunRecord
from plumbline.launcher.runtime.replay.search import AROUND, Found, Usual, search, usual
from plumbline.launcher.runtime.replay.steps import Replay, Stash, without
from plumbline.launcher.runtime.replay.windows import Window, compare, tolerance_of
from plumbline.launcher.runtime.run.chain import Step
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.objectives.objective import Batch

AFTER = 8
"""Steps after the spike to repeat without its causes."""


@dataclass(frozen=True)
class Standing:
    """Compare a number of a step with those of the surrounding steps."""

    quantity: str
    """grad_norm or loss."""
    value: float
    usual: Usual

    @property
    def is_spike(self) -> bool:
        """Return whether it is outside the usual range."""
        return not self.usual.has(self.value)

    def carries(self, part: Step, share: float) -> bool:
        """Return whether some samples cause a spike.

        The samples' contribution to a mean over all labels is their own mean times their share of the labels. By this
        measure, half of an ordinary batch has a shorter gradient than the whole.

        Args:
            part: the step with only these samples.
            share: their share of all labels of the step.
        """
        if self.quantity == "grad_norm":
            return not part.grad_norm * share <= self.usual.median
        return not (part.loss - self.usual.median) * share <= (self.usual.limit - self.usual.median) / 2


@dataclass(frozen=True)
class Explanation:
    """Explain which samples caused a spike."""

    window: Window
    """The steps that were recomputed before it."""
    tolerance: float | None
    difference: Difference | None
    """The first difference from what the run wrote, in these steps or the step itself."""
    found: Found
    proof: list[Step]
    """The step and those after it, without the causes."""


def standings(record: RunRecord, step: int) -> list[Standing]:
    """Compare the gradient norm and loss of a step with those of the surrounding steps.

    Raises:
        ValueError: the step, or enough steps around it, were not recorded.
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
    """Find the causes of a spike, and repeat the steps without them. Collective.

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
        """Make the step with only these of its samples."""
        stash.restore()
        return replay.make(without(batches, labels.keys() - set(samples)))

    def value(samples: Sequence[int]) -> float:
        """Return the number that spiked, for these samples."""
        made = make(samples)
        LOG.info(
            f"step {step} on {len(samples)} of {len(labels)} samples: {spike.quantity} "
            f"{getattr(made, spike.quantity):.4g}"
        )
        return float(getattr(made, spike.quantity))

    def carries(samples: Sequence[int]) -> bool:
        """Return whether these samples cause a spike."""
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
    """Make all steps up to `last`, and return the first difference from what was written."""
    first: Difference | None = None
    while replay.step < last:
        made = replay.make(replay.batches())
        written = record.written(made.step)
        if first is None and written is not None:
            first = compare(made, written, tolerance)
    return first


def _labels(batches: Sequence[Batch], world: World) -> dict[int, int]:
    """Return sample number -> number of labels, ascending, for all samples of a step on all ranks."""
    mine = {
        int(number): int((labels != IGNORED).sum())
        for batch in batches
        for number, labels in zip(batch["sample_index"], batch["labels"], strict=True)
    }
    return dict(sorted(item for share in gather_objects(mine, world) for item in share.items()))
