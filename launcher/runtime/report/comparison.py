"""Make the page that compares several runs: what they are, how they differ, and their numbers overlaid."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.commands.cli import duration
from plumbline.launcher.runtime.config.run_files import CONFIG
from plumbline.launcher.runtime.config.yaml_files import plain_values, read_yaml
from plumbline.launcher.runtime.report import html
from plumbline.launcher.runtime.report.alerts import find_alerts
from plumbline.launcher.runtime.report.facts import read_facts, scores, state
from plumbline.launcher.runtime.report.figures import colour, short, smooth
from plumbline.launcher.runtime.report.history import read_history
from plumbline.launcher.runtime.report.html import Cell, Swatch
from plumbline.launcher.runtime.report.overlay import By, Compared, Overlay
from plumbline.launcher.runtime.report.page import summary

RUNS, DIFFERENCES, ALERTS = "Runs", "Differences", "Alerts"
NAMES = ("run.name", "run.root")  # keys that do not affect training
CODE = ("git_commit", "git_dirty", "packages", "gpus", "world_size")
"""Keys of environment.json on which a result may depend."""
SCORES = ("loss", "thinking_loss", "bits_per_byte", "exact_match", "thinking_exact_match")
"""Held-out scores of the table of runs, those that any run has."""
BITS_PER_BYTE = re.compile("(eval/.*)/bits_per_byte")
ROUNDING = 1 + 1e-9
"""Ratio of two equal quotients, at most."""


def make(folders: Sequence[Path], by: By) -> tuple[str, dict[str, Any], list[str]]:
    """Return the page of several runs, its JSON document, and lines with each caution and a summary.

    Raises:
        ValueError: one is given twice, is not a run, is damaged, or lacks what is needed to place its numbers by `by`.
    """
    runs = read_runs(folders)
    found, warned = differences(runs), cautions(runs)
    document = {
        "by": by,
        "runs": [summary(run.history, run.alerts) for run in runs],
        "differences": found,
        "cautions": warned,
    }
    count = sum(len(run.alerts) for run in runs)
    last = f"{len(runs)} runs, {len(found)} difference(s), {count} alert(s)"
    return _page(runs, by, found, warned), document, [*warned, last]


def read_runs(folders: Sequence[Path]) -> list[Compared]:
    """Read several runs.

    Raises:
        ValueError: one is given twice, is not a run, or is damaged.
    """
    runs = []
    for number, (name, folder) in enumerate(zip(distinct_names(folders), folders, strict=True)):
        history, known = read_history(folder), read_facts(folder)
        tint = colour(number, len(folders))
        runs.append(Compared(name, history, known, find_alerts(history, known.vocab_size), tint))
    return runs


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest distinct suffixes of paths.

    Raises:
        ValueError: a folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path}: given twice; name each run once")
    longest = max(len(path.parts) for path in paths)
    ends = (["/".join(path.parts[-length:]) for path in paths] for length in range(1, 1 + longest))
    return next(names for names in ends if len(set(names)) == len(names))


def _page(runs: Sequence[Compared], by: By, found: Mapping[str, Sequence[Any]], warned: Sequence[str]) -> str:
    """Return the page of several runs, a self-contained HTML document, from their differences and cautions.

    Raises:
        ValueError: a run lacks what is needed to place its numbers by `by`.
    """
    groups = [group for group in Overlay(runs, by).groups() if group.figures]
    title = f"{len(runs)} runs by {'FLOPs' if by == 'flops' else by}"
    return html.document(
        title,
        [
            f"<h1>{title}</h1>",
            html.contents([RUNS, DIFFERENCES, *(group.title for group in groups), ALERTS]),
            html.heading(RUNS),
            _table_of_runs(runs),
            html.heading(DIFFERENCES, "In configuration, code and machine."),
            *(f"<p>{escape(caution)}</p>" for caution in warned),
            _table_of_differences(runs, found),
            *map(html.group, groups),
            html.heading(ALERTS),
            *_table_of_alerts(runs),
        ],
    )


def cautions(runs: Sequence[Compared]) -> list[str]:
    """Return which numbers of these runs are not comparable, a sentence each."""
    found = []
    tokenizers = [run.history.folder / "tokenizer" / "tokenizer.json" for run in runs]
    if len({file.read_bytes() for file in tokenizers if file.is_file()}) > 1:
        found.append(
            "The runs read text by different tokenizers: nats per token do not compare, bits per byte of held-out text "
            "do."
        )
    elif names := [name for name, found_by in _nats_per_bit(runs).items() if max(found_by) > ROUNDING * min(found_by)]:
        found.append(
            f"Under the name {', '.join(names)} the runs score different held-out text, of other corpora or of one "
            "that has grown since: their losses on it do not compare."
        )
    leaves = [dict(_leaves_of(run)) for run in runs]
    windows = {own["data.sequence_length"] for own in leaves if "data.sequence_length" in own}
    if len(windows) > 1:
        found.append(
            f"The runs read held-out text in windows of different length (data.sequence_length = "
            f"{', '.join(map(str, sorted(windows)))}), in which tokens have more or less before them: their held-out "
            "losses do not compare."
        )
    if len({own.get("model.document_mask") for own in leaves} - {None}) > 1:
        found.append(
            "In some of the runs tokens attend to documents before their own, in others not (model.document_mask): "
            "their held-out losses do not compare."
        )
    counts = [(own.get("train.eval_batches"), own.get("data.micro_batch_size")) for own in leaves]
    if len({batches and (batches, size) for batches, size in counts}) > 1:  # no number of batches means all
        found.append(
            "The runs score different amounts of held-out text (train.eval_batches counts micro-batches of "
            "data.micro_batch_size): their held-out losses do not quite compare."
        )
    return found


def _nats_per_bit(runs: Sequence[Compared]) -> dict[str, list[float]]:
    """Return held-out source -> its loss over its bits per byte in each run: set by its text and tokenizer alone."""
    found: dict[str, list[float]] = {}
    for series in (run.history.series for run in runs):
        for key in series:
            if (scored := BITS_PER_BYTE.fullmatch(key)) and (loss := series.get(f"{scored[1]}/loss")) is not None:
                nats, bits = float(loss.values[-1]), float(series[key].values[-1])
                if bits and math.isfinite(ratio := nats / bits):
                    found.setdefault(scored[1].removeprefix("eval/"), []).append(ratio)
    return found


def differences(runs: Sequence[Compared]) -> dict[str, list[Any]]:
    """Return key -> its value in each run, for the keys in which configuration, code or machine differ."""
    leaves = [dict(_leaves_of(run)) for run in runs]
    keys = dict.fromkeys(chain.from_iterable(leaves))
    values = {key: [of_run.get(key) for of_run in leaves] for key in keys if key not in NAMES}
    return {key: of_runs for key, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)}


def _leaves_of(run: Compared) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a run's configuration as written, possibly by an older version."""
    file = run.history.folder / CONFIG
    if file.is_file():
        yield from _leaves("", plain_values(read_yaml(file), str(file)))
    environment = run.known.environment or {}
    yield from _leaves("environment.", {key: environment[key] for key in CODE if key in environment})


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _leaves(f"{path}{key}.", child)
    elif isinstance(value, list) and any(isinstance(child, Mapping) for child in value):
        for number, child in enumerate(value):
            yield from _leaves(f"{path}{number}.", child)
    else:
        yield path.removesuffix("."), value


def _table_of_runs(runs: Sequence[Compared]) -> str:
    found = [scores(run.history) for run in runs]
    sources = dict.fromkeys(chain.from_iterable(found))
    columns = [(source, score) for source in sources for score in SCORES]
    columns = [(source, score) for source, score in columns if any(score in each.get(source, {}) for each in found)]
    header = ["run", "state", "parameters", "steps", "tokens", "FLOPs", "time", "training loss, running mean"]
    header += [f"{source} {score.replace('_', ' ')}" for source, score in columns]
    rows: list[list[Cell]] = []
    for run, own in zip(runs, found, strict=True):
        flops, loss = run.known.flops_per_token, run.history.series.get("loss")
        rows.append(
            [
                Swatch(run.name, run.colour),
                state(run.history, run.known),
                "" if run.known.parameters is None else short(run.known.parameters),
                f"{run.history.step:,}",
                short(run.history.tokens),
                "" if flops is None else f"{flops * run.history.tokens:.3g}",
                "" if run.known.seconds is None else duration(run.known.seconds),
                "" if loss is None else f"{smooth(loss.values)[-1]:.4f}",
                *(own.get(source, {}).get(score, "") for source, score in columns),
            ]
        )
    return html.table(header, rows, words=2)


def _table_of_differences(runs: Sequence[Compared], found: Mapping[str, Sequence[Any]]) -> str:
    if not found:
        return '<p class="quiet">None.</p>'
    rows = [[key, *("-" if value is None else str(value) for value in values)] for key, values in found.items()]
    return html.table(["key", *(run.name for run in runs)], rows, words=1 + len(runs))


def _table_of_alerts(runs: Sequence[Compared]) -> Iterator[str]:
    rows: list[list[Cell]] = []
    for run in runs:
        for kind, count in Counter(alert.kind for alert in run.alerts).items():
            first = min(alert.step for alert in run.alerts if alert.kind == kind)
            rows.append([Swatch(run.name, run.colour), kind, str(count), f"{first:,}"])
    if rows:
        yield "<p>The page of a run says what they mean and what to do: <code>python launcher/report.py RUN</code>.</p>"
        yield html.table(["run", "kind", "alerts", "first step"], rows, words=2)
    else:
        yield '<p class="quiet">None in any run.</p>'
