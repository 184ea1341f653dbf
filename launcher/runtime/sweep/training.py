"""Train the unfinished runs of one process's share of a sweep, and report failures."""

from contextlib import closing

from plumbline.data.workspace import check_folder
from plumbline.launcher.runtime.cluster.deadline import watch_time_limit
from plumbline.launcher.runtime.sweep.cells import Cell
from plumbline.launcher.runtime.sweep.names import write_names
from plumbline.launcher.runtime.sweep.plan import Plan
from plumbline.launcher.runtime.sweep.pool import default_workers, places, run_all
from plumbline.launcher.runtime.sweep.progress import Progress
from plumbline.launcher.runtime.sweep.worker import ERROR, Outcome, outcome_of, why_failed
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.trackers import TrackerName, check_trackers

Share = tuple[int, int]
"""(i, n): every n-th run, starting with the i-th."""


def train(plan: Plan, share: Share, workers: int | None, stop: StopRequest) -> list[Cell]:
    """Train the unfinished runs of a share, and return the cells that other processes were training.

    Args:
        plan: the sweep.
        share: the share of this process.
        workers: most processes that train at once; None means one per GPU, or per core.
        stop: once it is set, the workers save their cells and exit.

    Raises:
        ValueError: a tracker or a run folder cannot be used, or no worker can start.
    """
    LOG.info(intention(plan, share, workers))
    todo = plan.unfinished(runs_of(plan, share))
    check_trackers(trackers_of(todo))
    for cell in todo:
        check_folder(cell.config.run.folder, option="run folder")
    where = places(_workers_for(todo, workers), plan.sweep.folder / "workers.log")
    write_names(plan.sweep.folder, [(cell.signature, str(cell)) for cell in plan.cells])
    stop.defer()
    watch_time_limit(stop, is_main=True)
    left: list[Cell] = []
    with closing(Progress(todo)) as progress:

        def ended(cell: Cell, outcome: Outcome) -> None:
            progress.ended(cell, outcome)
            if outcome == "elsewhere":
                left.append(cell)

        run_all(todo, where, plan.sweep.how.run, plan.sweep.keep_checkpoints, stop, ended)
    return left


def intention(plan: Plan, share: Share, workers: int | None) -> str:
    """Return one line on what `train` will do: cells, distinct runs, how many remain, and with how many workers."""
    mine = runs_of(plan, share)
    todo = plan.unfinished(mine)
    runs = {cell.signature for cell in plan.runs}
    cells = sum(cell.signature in runs for cell in plan.cells)
    of_all = "" if share[1] == 1 else f" (share {share[0]} of {share[1]})"
    return (
        f"{plan.sweep.folder}: {cells} cells, {len(runs)} distinct runs; of {len(mine)}{of_all} "
        f"{len(mine) - len(todo)} are finished, {len(todo)} to do with {_workers_for(todo, workers)} worker(s)"
    )


def _workers_for(todo: list[Cell], workers: int | None) -> int:
    """Return how many workers train at once."""
    return min(workers or default_workers(), len(todo))


def runs_of(plan: Plan, share: Share) -> list[Cell]:
    """Return the runs of a share."""
    first, step = share
    return plan.runs[first::step]


def trackers_of(cells: list[Cell]) -> list[TrackerName]:
    """Return the trackers that some cell's run asks for."""
    return sorted({name for cell in cells for name in cell.config.metrics.trackers})


def report_failed(cells: list[Cell]) -> bool:
    """Log the runs that failed and why; return whether there are any."""
    failed = [cell for cell in cells if outcome_of(cell.config) == "failed"]
    for cell in failed:
        LOG.info(f"failed: {cell}: {why_failed(cell.config)} ({cell.config.run.folder / ERROR})")
    return bool(failed)
