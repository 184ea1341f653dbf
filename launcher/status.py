# PYTHON_ARGCOMPLETE_OK
"""Show the state of runs: step, speed, newest checkpoint, starts, why they ended; for one run, where its time went.

python launcher/status.py                                # every run in runs/
python launcher/status.py runs/quickstart                # one run, and its ledger
python launcher/status.py /scratch/me/runs               # every run in a folder
python launcher/status.py runs/sweeps/grid               # every run of a sweep, with its labels
python launcher/status.py runs/quickstart --json         # with all attempts, for programs

Nothing is changed. If a run's status says that it is training but no process holds its lock, its process has died:
start the same command again to continue it.
"""

import argparse
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from plumbline.launcher.runtime.cluster.slurm_queue import queued_jobs
from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.report.standing import Standing, look, runs_of
from plumbline.launcher.runtime.run.ledger import BUCKETS, goodput, total
from plumbline.launcher.runtime.sweep.names import names_of

HEADER = ("run", "state", "step", "loss", "tokens/s", "eta", "checkpoint", "starts", "goodput", "why")
LEFT = (0, 1, 9)  # columns of words


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "runs",
        type=cli.existing,
        nargs="*",
        metavar="RUN",
        help="run folders, folders of runs, or folders of sweeps (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    return parser.parse_args()


def main() -> None:
    """Read the state of each run and print it."""
    arguments = parse_arguments()
    folders = [run for folder in arguments.runs or [Path("runs")] for run in runs_of(folder)]
    jobs = queued_jobs()
    found = [look(folder, jobs) for folder in folders]
    if arguments.json:
        cli.print_json({"runs": [{**run.to_json(), "cells": names_of(run.folder)} for run in found]})
        return
    for line in table([HEADER, *map(cells, found)]):
        print(line)
    if [run.folder for run in found] == arguments.runs and len(found) == 1 and found[0].attempts:
        print()
        for line in ledger(found[0]):
            print(line)
        for made in found[0].interventions:
            print(cli.escaped(str(made)))


def cells(standing: Standing) -> tuple[str, ...]:
    """Return the row of a run, with name and reason escaped, since another user may have written them."""
    status, saved = standing.status, standing.checkpoint
    steps, loss, speed = text(None if saved is None else saved.step, ","), None, None
    if status is not None:
        loss, speed = status.loss, status.tokens_per_second
        if status.step is not None:
            steps = f"{status.step:,}/{text(status.total_steps, ',')}"
    cell = next((f": {cell}" for cell in names_of(standing.folder)), "")
    return (
        cli.escaped(standing.folder.resolve().name + cell),
        cli.escaped(standing.state),
        steps,
        text(loss, ".4f"),
        text(speed, ",.0f"),
        "-" if standing.eta is None else cli.duration(standing.eta),
        "-" if saved is None else f"{saved.step:,}, {cli.duration(max(0.0, standing.seen - saved.time))} ago",
        str(len(standing.attempts)),
        text(goodput(total(standing.attempts)), ".1%"),
        cli.escaped(standing.why or ""),
    )


def text(value: float | None, form: str) -> str:
    """Return a number as text, or a dash if it is unknown."""
    return "-" if value is None else format(value, form)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, with words aligned left and numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (
            cell.ljust(width) if number in LEFT else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()


def ledger(standing: Standing) -> Iterator[str]:
    """Yield lines on how the time of a run was spent, over all its attempts."""
    first, last = (
        datetime.fromtimestamp(moment) for moment in (standing.attempts[0].queued, standing.attempts[-1].end)
    )
    yield f"{len(standing.attempts)} start(s), {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S}"
    seconds = total(standing.attempts)
    whole = sum(seconds.values())
    for bucket in BUCKETS:
        yield f"{bucket:<10}  {cli.duration(seconds[bucket]):>10}  {seconds[bucket] / max(whole, 1e-9):>6.1%}"
    yield f"{'total':<10}  {cli.duration(whole):>10}"
    yield f"goodput {text(goodput(seconds), '.1%')}: steps / total"


if __name__ == "__main__":
    cli.run(main)
