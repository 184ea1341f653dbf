"""Overlay several runs, by tokens, FLOPs or time."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from plumbline.launcher.runtime.report import figures
from plumbline.launcher.runtime.report.alerts import Alert
from plumbline.launcher.runtime.report.diagnostics import GROUPS, OUTLIERS, TRAINING, Panel
from plumbline.launcher.runtime.report.facts import Facts
from plumbline.launcher.runtime.report.figures import Line, Scale
from plumbline.launcher.runtime.report.groups import COSTS, LOSS, SCORES, Matched, select
from plumbline.launcher.runtime.report.history import Floats, History, Series, over_places
from plumbline.launcher.runtime.report.html import Figure, Group
from plumbline.launcher.runtime.scoring.scores import diverged_above

By = Literal["tokens", "flops", "time"]
OVER = {"mean": "Mean over blocks.", "max": "Largest of all blocks.", "min": "Least of all blocks."}
TIMES = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
OfRuns = Mapping[int, Series]
"""Number of a run -> series."""


@dataclass(frozen=True)
class Compared:
    """Hold one of several runs."""

    name: str
    """Distinguishes it from the others."""
    history: History
    known: Facts
    alerts: Sequence[Alert]
    colour: str

    def place(self, tokens: Floats, by: By) -> Floats:
        """Return the horizontal positions of numbers written after `tokens` tokens: tokens, FLOPs or seconds.

        Raises:
            ValueError: the run lacks the information; names what is missing.
        """
        if by == "time":
            return self.history.seconds(tokens)
        if by == "tokens":
            return tokens
        if self.known.flops_per_token is None:
            raise ValueError(f"{self.history.folder}: no config.yaml that can be read; leave out --by flops")
        return tokens * self.known.flops_per_token


@dataclass(frozen=True)
class Overlay:
    """Draw the same figures as for one run, with a line per run."""

    runs: Sequence[Compared]
    by: By

    def groups(self) -> Iterator[Group]:
        """Yield groups of figures in the order of a run's own page; some may be empty."""
        yield Group("Loss and rate", "", [*self._losses(), *self._held_out(), *self._panels(TRAINING)])
        yield Group("Scores", "Of the objective, and of what is held out.", [*self._matched(SCORES)])
        for group in GROUPS:
            costs = self._matched(COSTS) if group.title == OUTLIERS else ()
            yield Group(group.title, group.text, [*self._panels(group.panels), *costs])

    def figure(
        self,
        title: str,
        text: str,
        series: OfRuns,
        key: str = "",
        log: bool = False,
        marked: bool = False,
        cut: bool = True,
    ) -> Iterator[Figure]:
        """Yield the figure of one number for the runs that have it, if any."""
        drawn = [
            Line(run.name, run.place(own.tokens, self.by), own.values, run.colour, marked=marked)
            for run, own in ((self.runs[number], own) for number, own in series.items())
            if np.isfinite(own.values).any()
        ]
        if drawn:
            yield Figure(title, text, figures.lines(drawn, self.scale, log=log, cut=cut), key)

    @cached_property
    def scale(self) -> Scale:
        """Return the scale on which the longest run has small numbers."""
        if self.by == "tokens":
            return figures.TOKENS
        longest = max(float(run.place(np.array([float(run.history.tokens)]), self.by)[0]) for run in self.runs)
        if self.by == "time":
            unit, seconds = next(each for each in TIMES if longest >= 2 * each[1] or each[1] == 1)
            return Scale(f"{unit} of steps, without evaluations and saves", seconds)
        power = 3 * int(np.log10(max(longest, 1.0)) // 3)
        return Scale(f"training FLOPs, 10^{power}", 10.0**power)

    @cached_property
    def most(self) -> float:
        """Return the largest loss to draw, in nats, beyond which a run counts as diverged; inf if it is unknown."""
        sizes = [run.known.vocab_size for run in self.runs if run.known.vocab_size is not None]
        return diverged_above(max(sizes)) if sizes else math.inf

    @cached_property
    def _diverged(self) -> list[int]:
        """Return the runs whose training loss rose above `most`, or ended there; one that has just begun is there."""
        losses = {number: own.values for number, own in self._all("loss").items()}
        return [
            number
            for number, own in losses.items()
            if not own[-1] <= self.most and (self.runs[number].history.complete or (own <= self.most).any())
        ]

    def _below(self, found: OfRuns) -> tuple[OfRuns, str]:
        """Return losses without those of diverged runs that would press all others flat, and a sentence, or ""."""
        diverged = [number for number in self._diverged if number in found and (found[number].values > self.most).any()]
        kept = {**found, **{number: _up_to(self.most, found[number]) for number in diverged}}
        if not diverged or not any(np.isfinite(own.values).any() for own in kept.values()):
            return found, ""
        names = ", ".join(self.runs[number].name for number in diverged)
        return kept, f" Above {self.most:.4g} nothing is drawn of the runs that diverged: {names}."

    def _losses(self) -> Iterator[Figure]:
        smooth, left_out = self._below({number: _smooth(own) for number, own in self._all("loss").items()})
        yield from self.figure("Training loss", f"Nats per token, running mean.{left_out}", smooth, "loss")
        late = {number: own.where(own.tokens >= own.tokens[-1] / 2) for number, own in smooth.items()}
        yield from self.figure("Training loss, second half", "The same, enlarged.", late, "loss", cut=False)

    def _held_out(self) -> Iterator[Figure]:
        first = self.runs[0].name
        for key in self._keys(LOSS):
            name = key.removeprefix("eval/").removesuffix("/loss")
            found, left_out = self._below(self._all(key))
            yield from self.figure(f"Held-out loss: {name}", f"Nats per token.{left_out}", found, key, marked=True)
            apart = {number: apart_from(own, found[0]) for number, own in found.items() if number} if 0 in found else {}
            text = f"Minus that of {first} after as many tokens, nats; below 0 it is better."
            yield from self.figure(f"Held-out loss over {first}: {name}", text, apart, marked=True, cut=False)

    def _panels(self, panels: Sequence[Panel]) -> Iterator[Figure]:
        for panel in panels:
            layers = {number: run.history.layers(panel.quantity) for number, run in enumerate(self.runs)}
            by_block = {number: over_places(own, panel.over) for number, own in layers.items() if own}
            text = f"{panel.text} {OVER[panel.over]}" if by_block else panel.text
            yield from self.figure(panel.title, text, by_block or self._all(panel.quantity), panel.quantity, panel.log)

    def _matched(self, wanted: Iterable[Matched]) -> Iterator[Figure]:
        """Yield a figure for each key that matches."""
        for title, text, pattern in wanted:
            for key in self._keys(pattern):
                yield from self.figure(f"{title}: {key.removeprefix('eval/')}", text, self._all(key), key, marked=True)

    def _all(self, key: str) -> dict[int, Series]:
        found = ((number, run.history.series.get(key)) for number, run in enumerate(self.runs))
        return {number: own for number, own in found if own is not None}

    def _keys(self, pattern: re.Pattern[str]) -> list[str]:
        return sorted({key for run in self.runs for key in select(run.history, pattern)})


def apart_from(series: Series, base: Series) -> Series:
    """Return the difference of two series where both are known, interpolating `base` linearly."""
    inside = series.where((series.tokens >= base.tokens[0]) & (series.tokens <= base.tokens[-1]))
    return Series(inside.steps, inside.tokens, inside.values - np.interp(inside.tokens, base.tokens, base.values))


def _up_to(most: float, series: Series) -> Series:
    return replace(series, values=np.where(series.values > most, np.nan, series.values))


def _smooth(series: Series) -> Series:
    return Series(series.steps, series.tokens, figures.smooth(series.values))
