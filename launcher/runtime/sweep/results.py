"""Rebuild the results of a sweep so far from the run folders: results.jsonl, summary.json and the figure.

results.jsonl   one object for each cell: labels, sizes, learning rate, how it ended, losses, and its result.json.
                What it says of a finished run stays when the run's folder is gone
others.jsonl    the same of finished runs of other cells: what results.jsonl said before the sweep's file, the values
                given with it or a corpus changed. Summaries leave them out; they count again once their cells are back
summary.json    how many cells ended how, and what the sweep's kind makes of the results
summary.txt     the same in lines, as sweep.py prints them
summary.png     the figure, for kinds that have one
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plumbline.data.damage import read_object
from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.run_files import METRICS
from plumbline.launcher.runtime.run.status_file import RESULT
from plumbline.launcher.runtime.scoring.scores import diverged_above
from plumbline.launcher.runtime.sweep.cells import Cell, distinct
from plumbline.launcher.runtime.sweep.config import SweepConfig
from plumbline.launcher.runtime.sweep.kinds import Summary
from plumbline.launcher.runtime.sweep.result import MATCHES, Outliers, Result, RunOutcome, mean_of_corpora, read_rows
from plumbline.launcher.runtime.sweep.seed_means import mean
from plumbline.launcher.runtime.sweep.worker import FINISHED, outcome_of
from plumbline.launcher.runtime.system.files import (
    one_at_a_time,
    read_json_lines,
    read_key,
    write_json,
    write_json_lines,
    write_whole,
)
from plumbline.launcher.runtime.system.log import LOG

RESULTS, SUMMARY, LINES, FIGURE, LOCK = "results.jsonl", "summary.json", "summary.txt", "summary.png", "lock"
OTHERS = "others.jsonl"
NOWHERE: Mapping[str, RunOutcome] = MappingProxyType({})
LAST = 0.1  # share of the logged steps, at the end of the run, over which train_loss averages


@dataclass(frozen=True)
class SweepSummary:
    """Hold the results of a sweep so far: summary.json."""

    name: str
    kind: str
    cells: int
    """Number of cells; several may share a run."""
    runs: dict[str, int]
    """How a run ended -> number of runs."""
    found: Summary
    """The kind's summary of the results."""

    def to_json(self) -> dict[str, Any]:
        """Return the document, with the kind's summary under the kind's name."""
        counts = {"name": self.name, "kind": self.kind, "cells": self.cells, "runs": self.runs}
        return {**counts, self.kind: self.found.to_json()}


def describe(cell: Cell) -> Result:
    """Return the result of a cell before anything is known about its run."""
    config, bits = cell.config, cell.config.precision.training_bits
    return Result(
        labels=cell.labels,
        seed=config.run.seed,
        signature=cell.signature,
        run=str(config.run.folder),
        hidden_size=config.model.hidden_size,
        num_hidden_layers=config.model.num_hidden_layers,
        base_hidden_size=config.parameterization.base_hidden_size,
        base_num_hidden_layers=config.parameterization.base_num_hidden_layers,
        parameters=totals(plan_run(config).rows).non_embedding,
        weight_bits=bits["weight_bits"],
        activation_bits=bits["activation_bits"],
        kv_bits=bits["kv_bits"],
        weight_format=config.precision.weight_format,
        lr=config.optimizer.lr,
        group_size=config.precision.group_size,
    )


def read_results(cells: Sequence[Cell], elsewhere: Mapping[str, RunOutcome] = NOWHERE) -> list[Result]:
    """Return each cell with the outcome of its run; cells that share a run share its outcome.

    Args:
        cells: the cells.
        elsewhere: signature -> outcome of runs finished elsewhere, used if no folder here has finished the run.
    """
    outcomes = {cell.signature: _read_run(cell) for cell in distinct(cells)}
    known = {
        signature: outcome if outcome.status in FINISHED else elsewhere.get(signature, outcome)
        for signature, outcome in outcomes.items()
    }
    return [replace(describe(cell), outcome=known[cell.signature]) for cell in cells]


def _read_run(cell: Cell) -> RunOutcome:
    """Return how the run of a cell ended and what it measured."""
    config = cell.config
    status = outcome_of(config)
    if status not in FINISHED:
        return RunOutcome(status or "pending")
    records = _records(config.run.folder / METRICS)
    steps = [record for record in records if "loss" in record]
    done = [record["tokens"] for record in steps]
    branch = config.schedule.branch
    begun = config.data.batch_plan.tokens_before(branch.first_step) if branch is not None else 0
    seconds = [
        (tokens - before) / record["tokens_per_second"]
        for record, before, tokens in zip(steps, [begun, *done], done, strict=False)
    ]
    outcome = RunOutcome(status, tokens=done[-1] if done else 0, seconds=round(sum(seconds), 3))
    if status == "diverged":
        return replace(outcome, diverged=True)
    result = read_object(config.run.folder / RESULT)
    read_key(result, "step", int, config.run.folder / RESULT)
    outcome = replace(outcome, outliers=_outliers(records, result), result=result)
    loss = mean_of_corpora("loss", result)
    train_loss = _mean([record["loss"] for record in steps[-max(1, round(len(steps) * LAST)) :]])
    limits = (loss, math.inf), (train_loss, diverged_above(config.model.vocab_size))
    if not all(value < limit for value, limit in limits if value is not None):  # NaN is below none
        return replace(outcome, status="diverged", diverged=True)
    matches: dict[str, Any] = {score: mean_of_corpora(score, result) for score in MATCHES}
    return replace(outcome, loss=loss, train_loss=train_loss, evaluations=_evaluations(records), **matches)


def _evaluations(records: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return score -> step -> mean over corpora, for the scores that a run has."""
    found: dict[str, dict[int, float]] = {}
    for record, score in product(records, MATCHES):
        if (value := mean_of_corpora(score, record)) is not None:
            found.setdefault(score, {})[record["step"]] = value
    return found


def _outliers(records: Sequence[dict[str, Any]], result: dict[str, Any]) -> Outliers | None:
    """Return the diagnostics of outliers, or None for a run without diagnostics."""
    observations = [record for record in records if "stream/kurt/head" in record]
    if not observations:
        return None

    def stream(quantity: str, record: dict[str, Any]) -> list[float]:
        return [value for key, value in record.items() if key.startswith(f"stream/{quantity}/")]

    last = observations[-1]
    speeds = sorted(record["tokens_per_second"] for record in records if "tokens_per_second" in record)
    return Outliers(
        kurt=_mean(stream("kurt", last)),
        kurt_peak=max(value for record in observations for value in stream("kurt", record)),
        mmr=_mean(stream("mmr", last)),
        corr=last["stream/corr_mean/head"],
        w8a8_delta=mean_of_corpora("w8a8_delta", result),
        tokens_per_second=speeds[len(speeds) // 2],
    )


def _mean(values: list[float]) -> float | None:
    return mean(values) if values else None


def _records(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file; empty if there is no such file."""
    return [record for _, record in read_json_lines(file)] if file.is_file() else []


def summarize(sweep: SweepConfig, results: Sequence[Result]) -> SweepSummary:
    """Return the kind's summary of the results, and the number of runs per outcome.

    Raises:
        ValueError: the results lack what this kind needs, such as those of another sweep.
    """
    sweep.how.check(sweep.settings, results)
    return SweepSummary(
        name=sweep.name,
        kind=sweep.kind,
        cells=len(results),
        runs=dict(Counter({result.signature: result.outcome.status for result in results}.values())),
        found=sweep.how.summarize(sweep.settings, results),
    )


def check_same_cells(sweep: SweepConfig, cells: Sequence[Cell], train: bool = False) -> None:
    """Refuse to rebuild results of one sweep from the cells of another; only warn if they are to be trained.

    Raises:
        ValueError: the sweep's folder has finished runs, but none of these cells.
    """
    files = (RESULTS,) if train else (RESULTS, OTHERS)  # rows of other cells are already kept apart
    finished = {signature for name in files for signature in _finished_rows(sweep.folder / name)}
    if not finished or finished & {cell.signature for cell in cells}:
        return
    message = (
        f"{sweep.folder} holds {len(finished)} finished runs, none of them of these cells: give the "
        "section.key=value that the sweep was run with, or rename the sweep"
    )
    if not train:
        raise ValueError(message)
    LOG.warning(f"{message}; otherwise their rows move to {OTHERS}")


def _finished_rows(file: Path) -> dict[str, Result]:
    """Return signature -> a row for each finished run in a file; empty if there is no such file."""
    rows = read_rows(file) if file.is_file() else []
    return {row.signature: row for row in rows if row.outcome.status in FINISHED}


def write_results(
    sweep: SweepConfig,
    cells: Sequence[Cell],
    elsewhere: Mapping[str, RunOutcome] = NOWHERE,
    seeds: Collection[int] | None = None,
) -> SweepSummary:
    """Rebuild everything from the run folders and from runs made elsewhere, and return the summary.

    Args:
        sweep: the sweep.
        cells: all its cells.
        elsewhere: signature -> outcome of runs made on another machine.
        seeds: leave out runs of other seeds that have not begun; None keeps all, as do none if nothing has begun.

    Raises:
        ValueError: results.jsonl or others.jsonl cannot be read; they are kept, since their runs may be gone.
    """
    sweep.folder.mkdir(parents=True, exist_ok=True)
    # One process at a time, or one that read early could overwrite the results of a later one
    with one_at_a_time(sweep.folder / LOCK):
        earlier, latest = (_finished_rows(sweep.folder / name) for name in (OTHERS, RESULTS))
        known = {signature: row.outcome for signature, row in {**earlier, **latest}.items()}
        results = read_results(cells, {**known, **elsewhere})
        if seeds is not None:
            begun = {result.seed for result in results if result.outcome.status != "pending"}
            kept = begun.union(seeds) or {result.seed for result in results}
            results = [result for result in results if result.seed in kept]
        summary = summarize(sweep, results)
        ours = {cell.signature for cell in cells}
        if moved := {signature: row for signature, row in latest.items() if signature not in ours}:
            write_json_lines(sweep.folder / OTHERS, (row.to_json() for row in {**earlier, **moved}.values()))
        if others := {*earlier, *moved} - ours:
            LOG.info(f"{sweep.folder / OTHERS} keeps {len(others)} finished run(s) of other cells, out of the summary")
        write_json_lines(sweep.folder / RESULTS, (result.to_json() for result in results))
        write_json(sweep.folder / SUMMARY, summary.to_json())
        write_whole(sweep.folder / LINES, "\n".join(sweep.how.lines(summary.found)) + "\n")
        (sweep.folder / FIGURE).unlink(missing_ok=True)  # it may show another kind, or cells of an earlier file
        if sweep.how.plot is not None:
            sweep.how.plot(summary.found, sweep.folder / FIGURE)
    return summary
