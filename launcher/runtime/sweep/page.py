"""Make the page of a sweep from its folder: what it tried, the results, and the curves of its runs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plumbline.data.damage import read_object
from plumbline.launcher.runtime.commands.cli import duration
from plumbline.launcher.runtime.report import html
from plumbline.launcher.runtime.report.figures import short
from plumbline.launcher.runtime.report.html import Figure, Group
from plumbline.launcher.runtime.sweep.axis_plot import by_axis, curves
from plumbline.launcher.runtime.sweep.grid import Point, summarize
from plumbline.launcher.runtime.sweep.result import MATCHES, Result, read_rows
from plumbline.launcher.runtime.sweep.results import FIGURE, LINES, RESULTS, SUMMARY
from plumbline.launcher.runtime.sweep.seed_means import mean
from plumbline.launcher.runtime.sweep.worker import ERROR

SWEEP, POINTS, FAILED = "Sweep", "Points", "Failed runs"
POINTS_SHOWN = 200


def make(folder: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Return the page of a sweep, its JSON document, and a summary line.

    Raises:
        ValueError: results.jsonl or summary.json is damaged; names the file, and the line of results.jsonl.
    """
    results = read_rows(folder / RESULTS)
    summary = read_object(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    found = summarize(None, results)
    runs = Counter({result.signature: result.outcome.status for result in results}.values())
    said = ", ".join(f"{count} {status}" for status, count in runs.items())
    name = folder.resolve().name
    groups = [
        Group("Loss over each axis", "Held-out loss in nats, mean over seeds.", [*by_axis(found.points)]),
        Group("Curves", "", [*curves(results)]),
    ]
    shown, failed = [group for group in groups if group.figures], [*_failed(results)]
    text = html.document(
        name,
        [
            f"<h1>{escape(name)}</h1><p>{len(results)} cells; runs: {escape(said)}.</p>",
            html.contents([SWEEP, POINTS, *(group.title for group in shown), *([FAILED] if failed else [])]),
            html.heading(SWEEP),
            html.facts(_describe(folder, summary, results)),
            *_answer(folder, summary),
            html.heading(POINTS, "The best first; a loss is the mean over seeds, with its standard error."),
            *([] if found.caution is None else [f"<p>{escape(found.caution)}</p>"]),
            _table(found.points, results),
            *map(html.group, shown),
            *([html.heading(FAILED), html.table(["run", "why"], failed, words=2)] if failed else []),
        ],
    )
    return text, {"sweep": name, "runs": dict(runs), **found.to_json()}, [f"{len(results)} cells, {said}"]


def _describe(folder: Path, summary: Mapping[str, Any], results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    yield "folder", str(folder)
    yield "kind", str(summary.get("kind", "unknown"))
    for axis in _axes(results):
        yield axis, ", ".join(dict.fromkeys(str(result.labels.get(axis, "-")) for result in results))
    yield "seeds", ", ".join(map(str, sorted({result.seed for result in results})))
    sizes = sorted({(result.parameters, result.hidden_size, result.num_hidden_layers) for result in results})
    yield (
        "sizes without embedding",
        "; ".join(f"{short(count)} parameters ({width} x {depth})" for count, width, depth in sizes),
    )
    outcomes = {result.signature: result.outcome for result in results}.values()
    tokens = sorted({outcome.tokens for outcome in outcomes if outcome.tokens is not None})
    if tokens:
        yield "tokens of a run", " to ".join(map(short, dict.fromkeys((tokens[0], tokens[-1]))))
        yield "duration", f"{duration(sum(outcome.seconds or 0.0 for outcome in outcomes))} of steps, over all runs"


def _answer(folder: Path, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kind's evaluation as text and figure; nothing for a grid, whose points are the answer."""
    lines, picture = folder / LINES, folder / FIGURE
    if lines.is_file() and summary.get("kind") != "grid":
        yield f"<h3>What came of it</h3><pre>{escape(lines.read_text(encoding='utf-8', errors='replace'))}</pre>"
    if picture.is_file():
        yield f'<div class="figures">{html.figure(Figure("", "", picture.read_bytes(), full=True))}</div>'


def _axes(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(axis for result in results for axis in result.labels))


def _table(points: Sequence[Point], results: Sequence[Result]) -> str:
    """Return the table of points with their scores, without columns for scores that no run has."""
    axes = _axes(results)
    cells = [[result for result in results if result.labels == point.labels] for point in points[:POINTS_SHOWN]]
    scores = [score for score in MATCHES if any(getattr(result.outcome, score) is not None for result in results)]
    rows = []
    for point, own in zip(points, cells, strict=False):
        matches = [_mean([getattr(each.outcome, score) for each in own]) for score in scores]
        rows.append([*(str(point.labels.get(axis, "-")) for axis in axes), own[0].run, *matches, point.describe()])
    header = [*axes, "run of the first seed", *(score.replace("_", " ") for score in scores), "held-out loss"]
    more = len(points) - len(rows)
    return html.table(header, rows, words=len(axes) + 1) + (f"<p>and {more} more: see --json</p>" if more else "")


def _mean(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{mean(known):.1%}" if known else ""


def _failed(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Yield the runs that failed, and why if their folders exist."""
    for run in dict.fromkeys(result.run for result in results if result.outcome.status == "failed"):
        error = Path(run) / ERROR
        text = error.read_text(encoding="utf-8", errors="replace") if error.is_file() else ""
        yield run, text.partition("\n")[0]
