"""Draw all numbers of a run: loss and learning rate first, then its diagnostics, in reading order."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from plumbline.launcher.runtime.report import figures
from plumbline.launcher.runtime.report.alerts import Alert
from plumbline.launcher.runtime.report.diagnostics import GROUPS, OUTLIERS, TRAINING, Panel
from plumbline.launcher.runtime.report.figures import Line, colour, short
from plumbline.launcher.runtime.report.history import History, Series, over_places
from plumbline.launcher.runtime.report.html import Figure, Group

LOSS = re.compile(r"eval/.*loss")
AHEAD = re.compile(r"\w+/(loss(_\d+)?|gain)")  # reports of objectives
RIGHT = re.compile(r"eval/.*(exact_match|answer_match|accuracy)")
INT8 = re.compile(r"eval/.*/w8a8_delta")
Matched = tuple[str, str, re.Pattern[str]]
"""Title, meaning and keys of a figure."""
SCORES: tuple[Matched, ...] = (
    ("Loss ahead", "Nats per target further than the next token, by distance; gain: over the plain prediction.", AHEAD),
    (
        "Right answers",
        "Share of held-out examples, or of their tokens, that are right; thinking: with thoughts.",
        RIGHT,
    ),
)
COSTS: tuple[Matched, ...] = (
    ("Cost of int8", "Nats that int8 weights and inputs of the blocks' matrices add to the held-out loss.", INT8),
)
SIZES: tuple[Matched, ...] = (
    (
        "Sizes by role",
        "RMS of an update over its learning rate, and over what the optimizer asks for: 1 where Adam's eps is small.",
        re.compile(r"step_size/.*"),
    ),
    (
        "Sizes against the base run",
        "1 where the table of the parameterization is in force.",
        re.compile(r"transfer/.*"),
    ),
)
GAINS = "Entries of each learned gain: a line for each block's mean, grey from the least to the largest of all blocks."
UPDATES = "RMS of one update of each matrix over the RMS of the matrix; where it is 0, nothing is learned."
OTHERS = "Numbers of metrics.jsonl that have no other place."


def groups_of(history: History, alerts: Sequence[Alert]) -> Iterator[Group]:
    """Yield non-empty groups of figures, which show every number of metrics.jsonl except held-out counts."""
    updates = [Panel(key, key.removeprefix("update/rms_"), "", log=True) for key in history.quantities("update")]
    others = [Panel(key, key, "") for key in _unclaimed(history)]
    costs = {OUTLIERS: [*_matched(history, COSTS)]}
    found = (
        Group("Loss and rate", "", [*losses(history, alerts), *panels(history, TRAINING, alerts)]),
        Group("Scores", "Of the objective, and of what is held out.", [*_matched(history, SCORES)]),
        *(
            Group(group.title, group.text, [*panels(history, group.panels, alerts), *costs.get(group.title, [])])
            for group in GROUPS
        ),
        Group("Gains", GAINS, [*_gains(history)]),
        Group("Updates", UPDATES, [*panels(history, updates, alerts), *_matched(history, SIZES)]),
        Group("Others", OTHERS, [*panels(history, others, alerts)]),
    )
    yield from (group for group in found if group.figures)


def losses(history: History, alerts: Sequence[Alert]) -> Iterator[Figure]:
    """Yield the loss of the whole run and, enlarged, of its second half."""
    marks = [history.tokens_at(alert.key, alert.step) for alert in alerts if alert.key in ("loss", "grad_norm")]
    last = short(history.series["loss"].values[-1]) if "loss" in history.series else ""
    for start, title, text in (
        (0.0, "Loss", "Nats per token. Pale: each logged step, dark: their running mean; dotted: alerts."),
        (history.tokens / 2, "Loss, second half", "The same, enlarged."),
    ):
        drawn = [line.after(start) for line in loss_lines(history)]
        if any(len(line.x) for line in drawn):
            image = figures.lines(drawn, cut=start == 0, alerts=[mark for mark in marks if mark >= start])
            yield Figure(title, text, image, "loss", "" if start else last)


def loss_lines(history: History) -> Iterator[Line]:
    """Yield the lines of the training and held-out losses."""
    training, held_out = history.series.get("loss"), select(history, LOSS)
    if training is not None:
        if len(training.steps) >= 2 * figures.SMOOTHED:
            yield Line("", training.tokens, training.values, faint=True)
        yield Line("training", training.tokens, figures.smooth(training.values))
    for number, (key, series) in enumerate(held_out.items(), start=1):
        name = f"held out: {key.removeprefix('eval/').removesuffix('/loss')}"
        yield Line(name, series.tokens, series.values, colour(number, len(held_out) + 1), marked=True)


def panels(history: History, wanted: Iterable[Panel], alerts: Sequence[Alert]) -> Iterator[Figure]:
    """Yield the figures of those panels for which the run has numbers."""
    for panel in wanted:
        layers = history.layers(panel.quantity)
        if layers:
            draw = figures.depth_map if panel.style == "map" else figures.by_layer
            yield Figure(panel.title, panel.text, draw(layers, panel.log), panel.quantity)
        elif panel.quantity in history.series:
            series = history.series[panel.quantity]
            marks = [history.tokens_at(alert.key, alert.step) for alert in alerts if alert.key == panel.quantity]
            image = figures.lines([Line("", series.tokens, series.values)], log=panel.log, cut=True, alerts=marks)
            yield Figure(panel.title, panel.text, image, panel.quantity, short(series.values[-1]))


def select(history: History, pattern: re.Pattern[str]) -> dict[str, Series]:
    """Return key -> series of the matching keys, sorted by name."""
    return {key: history.series[key] for key in sorted(history.series) if pattern.fullmatch(key)}


def _matched(history: History, wanted: Iterable[Matched]) -> Iterator[Figure]:
    """Yield figures that each show all keys of a pattern."""
    for title, text, pattern in wanted:
        if found := select(history, pattern):
            drawn = [
                Line(key.removeprefix("eval/"), series.tokens, series.values, colour(number, len(found)), marked=True)
                for number, (key, series) in enumerate(found.items())
            ]
            yield Figure(title, text, figures.lines(drawn))


def _gains(history: History) -> Iterator[Figure]:
    """Yield a figure for each gain."""
    for quantity in history.quantities("gain"):
        kind, _, name = quantity.removeprefix("gain/").partition("_")
        if kind != "mean":
            continue
        low, mean, high = (_placed(history, f"gain/{each}_{name}") for each in ("min", "mean", "max"))
        band = None if not (low and high) else (over_places(low, "min"), over_places(high, "max"))
        yield Figure(name, "", figures.by_layer(mean, band=band), f"gain/*_{name}")


def _placed(history: History, quantity: str) -> Mapping[str, Series]:
    """Return the series of a number by place, or under no place if it exists once."""
    once = history.series.get(quantity)
    return history.layers(quantity) or ({} if once is None else {"": once})


def _unclaimed(history: History) -> list[str]:
    """Return the quantities that no other group shows."""
    claimed = {"loss", "slow_rank", *(panel.quantity for panel in TRAINING)}
    claimed |= {panel.quantity for group in GROUPS for panel in group.panels}
    claimed |= {key for _, _, pattern in SCORES for key in select(history, pattern)}
    return [
        quantity
        for quantity in history.quantities()
        if quantity not in claimed and not quantity.startswith(("eval/", "gain/", "step_size/", "transfer/", "update/"))
    ]
