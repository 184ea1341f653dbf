"""Make the page of a run, and a JSON document with the same facts."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from plumbline.launcher.runtime.report import html
from plumbline.launcher.runtime.report.alerts import ADVICE, Alert, find_alerts
from plumbline.launcher.runtime.report.examples import solved_and_failed
from plumbline.launcher.runtime.report.facts import Facts, describe, read_facts, scores, state
from plumbline.launcher.runtime.report.groups import groups_of
from plumbline.launcher.runtime.report.history import History, is_of_a_place, read_history
from plumbline.launcher.runtime.report.html import Group

RUN, ALERTS = "Run", "Alerts"
ALERTS_SHOWN = 20  # of each kind
SAMPLES_SHOWN = 4000  # characters


def make(folder: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Return the page of a run, its JSON document, and lines with each alert and a summary.

    Raises:
        ValueError: it is not a run, or is damaged.
    """
    history = read_history(folder)
    known = read_facts(folder)
    alerts = find_alerts(history, known.vocab_size)
    text = page(history, known, alerts, solved_and_failed(history))
    caution = [*filter(None, [_without_thoughts(known)])]
    return text, summary(history, alerts), [*caution, *map(str, alerts), f"{len(alerts)} alert(s)"]


def summary(history: History, alerts: Sequence[Alert]) -> dict[str, Any]:
    """Return the report for programs; numbers that are not finite become None, since JSON lacks them."""
    last = {key: _number(series.values[-1]) for key, series in sorted(history.series.items()) if not is_of_a_place(key)}
    return {
        "run": str(history.folder),
        "complete": history.complete,
        "step": history.step,
        "tokens": history.tokens,
        "last": last,
        "by_place": _by_places(history),
        "alerts": [asdict(alert) for alert in alerts],
    }


def page(history: History, known: Facts, alerts: Sequence[Alert], examples: Group | None = None) -> str:
    """Return the report for people, a self-contained HTML document; `examples` come after the numbers."""
    groups = [*groups_of(history, alerts), *([] if examples is None else [examples])]
    name = history.folder.resolve().name
    return html.document(
        name,
        [
            f"<h1>{escape(name)}</h1>",
            f"<p>{escape(_first_line(history, known))} {html.link(_count(alerts), ALERTS)}.</p>",
            html.contents([RUN, *(group.title for group in groups), ALERTS]),
            html.heading(RUN),
            html.facts(describe(history, known)),
            *_scores(history, known),
            *_samples(known.samples),
            *map(html.group, groups),
            *_alerts(history, alerts),
        ],
    )


def _first_line(history: History, known: Facts) -> str:
    whole = "" if known.plan is None else f" of {known.plan.total_steps:,}"
    with_thoughts = _without_thoughts(known) is not None
    key, name = ("thinking_loss", "loss with thoughts") if with_thoughts else ("loss", "loss")
    held_out = [f"{source} {found[key]}" for source, found in scores(history).items() if key in found]
    loss = f" Held-out {name}: {', '.join(held_out)}." if held_out else ""
    return f"{state(history, known).capitalize()}: step {history.step:,}{whole}, {history.tokens:,} tokens.{loss}"


def _without_thoughts(known: Facts) -> str | None:
    """Return a warning of the scores without thoughts, or None if training was for them."""
    return None if known.config is None else known.config.objective.without_thoughts


def _count(alerts: Sequence[Alert]) -> str:
    return f"{len(alerts)} alert{'s' if len(alerts) > 1 else ''}" if alerts else "No alerts"


def _scores(history: History, known: Facts) -> Iterator[str]:
    found = scores(history)
    if found:
        columns = list(dict.fromkeys(score for of_source in found.values() for score in of_source))
        rows = [[source, *(of_source.get(score, "") for score in columns)] for source, of_source in found.items()]
        yield f"<h3>{'Final scores' if history.complete else 'Scores so far'}</h3>"
        yield html.table(["held out", *(column.replace("_", " ") for column in columns)], rows)
        if (caution := _without_thoughts(known)) is not None:
            yield f"<p>{escape(caution)}.</p>"


def _samples(samples: str) -> Iterator[str]:
    if samples:
        left_out = f"\n... and {len(samples) - SAMPLES_SHOWN:,} characters more" if len(samples) > SAMPLES_SHOWN else ""
        yield f"<h3>Samples</h3><pre>{escape(samples[:SAMPLES_SHOWN].strip() + left_out)}</pre>"


def _alerts(history: History, alerts: Sequence[Alert]) -> Iterator[str]:
    """Yield, for each kind of alert, what to do and where it was raised."""
    yield html.heading(ALERTS)
    if not alerts:
        yield '<p class="quiet">None: all numbers are finite, no loss spikes, no kurtosis off its trend.</p>'
    for kind in dict.fromkeys(alert.kind for alert in alerts):
        own = [alert for alert in alerts if alert.kind == kind]
        advice = ADVICE[kind]
        yield f'<h3 class="alert">{escape(advice.title)}</h3><p>{escape(advice.text)}</p>'
        if advice.command:
            yield f"<pre>{escape(advice.command.format(run=shlex.quote(str(history.folder)), step=own[0].step))}</pre>"
        rows = [
            [alert.key, alert.message, f"{alert.step:,}", f"{history.tokens_at(alert.key, alert.step):,.0f}"]
            for alert in own[:ALERTS_SHOWN]
        ]
        yield html.table(("number", "what", "step", "tokens"), rows, words=2)
        if len(own) > ALERTS_SHOWN:
            yield f"<p>and {len(own) - ALERTS_SHOWN} more: see --json</p>"


def _by_places(history: History) -> dict[str, dict[str, Any]]:
    """Return quantity -> the last step at which it was observed, and its values there by place, in order of depth."""
    places = {}
    for quantity in sorted({key.rpartition("/")[0] for key in history.series if is_of_a_place(key)}):
        layers = history.layers(quantity)
        step = max(series.steps[-1] for series in layers.values())
        # A place without a number at that step must not show an older one
        values = {
            place: _number(series.values[-1]) if series.steps[-1] == step else None for place, series in layers.items()
        }
        places[quantity] = {"step": int(step), "last": values}
    return places


def _number(value: np.float64) -> float | None:
    return float(value) if math.isfinite(value) else None
