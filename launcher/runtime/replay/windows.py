"""Recompute windows of a run from the checkpoints that it kept, and compare them with what it wrote."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from plumbline.launcher.runtime.checkpoint.store import step_of
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.collectives import from_main
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.replay.record import Difference, RunRecord, same
from plumbline.launcher.runtime.replay.steps import Replay
from plumbline.launcher.runtime.run.chain import Step
from plumbline.launcher.runtime.run.metrics import REPORTED
from plumbline.launcher.runtime.system.log import LOG

TOLERANCES = {"fp32": 1e-3, "bf16": 5e-2}
"""Relative tolerance of loss, norm and weights on a different number of ranks, by precision."""
NEAR = 16
"""Most steps of a window on a different number of ranks, since rounding differences grow with each step."""


@dataclass(frozen=True)
class Window:
    """Describe the steps from one checkpoint (or the start) to the next (or the last step)."""

    first: int
    """Step after which it begins."""
    last: int
    begin: Path | None
    """The checkpoint of `first`, or None for the start of the run."""
    end: Path | None
    """The checkpoint of `last`, or None if there is none."""
    config: Config | None
    """Configuration of its steps, or None if it was not kept, so that they cannot be recomputed."""

    def cut(self, steps: int) -> "Window":
        """Return its first steps, if it has more."""
        if self.last - self.first <= steps:
            return self
        return replace(self, last=self.first + steps, end=None)

    def __str__(self) -> str:
        """Return it in words."""
        begun = "the start" if self.begin is None else self.begin.name
        return f"steps {self.first + 1} to {self.last} from {begun}"


@dataclass(frozen=True)
class Verdict:
    """Hold the result for a window."""

    window: Window
    tolerance: float | None
    """Relative tolerance, or None if everything had to be bitwise equal."""
    steps: int
    """Steps that are as written."""
    difference: Difference | None
    """The first."""


@dataclass(frozen=True)
class Verification:
    """Hold all that came of looking at a run."""

    record: RunRecord
    contradictions: list[Difference]
    """Of its records with each other."""
    verdicts: list[Verdict]
    left_out: list[Window]
    """Those that cannot be computed again."""

    @property
    def first(self) -> Difference | None:
        """Return the first difference by step, or None if the run is verified."""
        found = (verdict.difference for verdict in self.verdicts)
        return min([*self.contradictions, *(each for each in found if each is not None)], default=None)


def windows(record: RunRecord, most_steps: int | None = None) -> list[Window]:
    """Return all windows, in their order; each is cut where a start changed what is trained.

    Args:
        record: the run.
        most_steps: longer windows are cut to this.
    """
    begins: list[tuple[int, Path | None]] = [(step_of(folder), folder) for folder in record.whole]
    if min(record.chain.steps, default=0) == 1:
        begins.insert(0, (0, None))
    ends: list[tuple[int, Path | None]] = [(step_of(folder), folder) for folder in record.whole]
    last = max(record.chain.steps, default=0)
    found = []
    for first, begin in begins:
        stop, end = next(((step, folder) for step, folder in ends if step > first), (last, None))
        stop, end = (stop, end) if stop <= last else (last, None)
        if stop > first and first + 1 in record.chain.steps:
            alike = record.trained_alike(first, stop)
            window = Window(first, stop, begin, end, record.config_of(first + 1)).cut(alike - first)
            found.append(window if most_steps is None else window.cut(most_steps))
    return found


def choose(found: Sequence[Window], count: int) -> list[Window]:
    """Return so many windows by chance, or all there are, in their order."""
    return sorted(random.sample(found, min(count, len(found))), key=lambda window: window.first)


def recompute_some(
    record: RunRecord, wanted: int, most_steps: int | None, world: World
) -> tuple[list[Verdict], list[Window]]:
    """Recompute `wanted` windows, chosen at random on rank 0. Collective.

    Args:
        record: the run.
        wanted: how many, if that many have a known configuration.
        most_steps: longer windows are cut to this.
        world: the ranks that recompute.

    Returns:
        The result of each, and the windows that cannot be recomputed.

    Raises:
        ValueError: as for `recompute`.
    """
    there = windows(record, most_steps)
    left_out = [window for window in there if window.config is None]
    chosen = from_main(partial(choose, [window for window in there if window.config is not None], wanted), world)
    return recompute(record, chosen, world), left_out


def recompute(record: RunRecord, chosen: Sequence[Window], world: World) -> list[Verdict]:
    """Recompute the steps of some windows, each up to the first that differs from what was written. Collective.

    Raises:
        ValueError: these ranks cannot recompute a window, or a corpus or checkpoint cannot be used.
    """
    verdicts: list[Verdict] = []
    replay: Replay | None = None
    for number, window in enumerate(chosen, start=1):
        config = window.config
        assert config is not None, "only windows whose configuration is kept are chosen"
        if replay is None or replay.config != config:
            if replay is not None:
                replay.close()
            replay = Replay(config, record.skipped, world)
        tolerance = tolerance_of(record, window, config, world)
        if tolerance is not None:
            _check_draws(record, window, config, world)
            window = window.cut(NEAR)
        LOG.info(f"window {number}/{len(chosen)}: {window}")
        verdicts.append(_recompute(record, window, replay, tolerance))
    return verdicts


def tolerance_of(record: RunRecord, window: Window, config: Config, world: World) -> float | None:
    """Return the tolerance of a window on these ranks, or None if results must be bitwise equal."""
    if config.run.reproducible is not None:
        return None
    made = {record.ranks_at(step) for step in range(window.first + 1, window.last + 1)}
    return None if made <= {world.size, None} else TOLERANCES[config.deepspeed.precision]


def _check_draws(record: RunRecord, window: Window, config: Config, world: World) -> None:
    """Refuse to compare numbers if these ranks would draw different random numbers.

    Raises:
        ValueError: the window has to be recomputed on as many ranks as made it.
    """
    if config.model.dropout:
        raise ValueError(
            f"{world.size} rank(s): {record.folder} draws its dropout on each rank (model.dropout), so {window} can be "
            f"computed again on {record.ranks_at(window.first + 1)} alone, or with run.reproducible = any_ranks on "
            "any: start as many, or ask for --windows 0"
        )


def _recompute(record: RunRecord, window: Window, replay: Replay, tolerance: float | None) -> Verdict:
    replay.go_to(window.begin)
    while replay.step < window.last:
        batches = replay.batches()
        step, samples = replay.step + 1, replay.digest(batches)
        written = record.chain.steps.get(step)
        if written is None:
            missing = Difference(step, "chain", "has no line of this step")
            return Verdict(window, tolerance, step - 1 - window.first, missing)
        if samples != written.samples:
            text = f"the samples have the digest {samples[:16]}..., in the chain {written.samples[:16]}..."
            return Verdict(window, tolerance, step - 1 - window.first, Difference(step, "samples", text))
        difference = compare(replay.make(batches, samples), written, tolerance)
        if difference is not None:
            return Verdict(window, tolerance, step - 1 - window.first, difference)
    difference = None
    if window.end is not None and (key := replay.weights_unlike(window.end, tolerance)) is not None:
        difference = Difference(window.last, "weights", f"{key} is not what {window.end} holds")
    return Verdict(window, tolerance, window.last - window.first, difference)


def compare(made: Step, written: Step, tolerance: float | None) -> Difference | None:
    """Return the number in which a recomputed step differs from the chain, or None."""
    for key in REPORTED:
        one, other = getattr(made, key), getattr(written, key)
        is_near = tolerance is not None and abs(one - other) <= tolerance * abs(other)
        if not same(one, other) and not is_near:
            return Difference(made.step, key, f"{other!r} in the chain, {one!r} computed again")
    return None
