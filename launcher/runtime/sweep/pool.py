"""Manage the workers of a sweep in the process that hands out the cells."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from plumbline.launcher.runtime.sweep.cells import Cell
from plumbline.launcher.runtime.sweep.worker import ERROR, Outcome, Place, Run, work
from plumbline.launcher.runtime.system.files import write_whole
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.signals import SIGNALS, StopRequest

Report = Callable[[Cell, Outcome], None]
POLL_SECONDS = 0.5  # between checks whether we were asked to stop
EXIT_SECONDS = 5.0  # time for a worker that has closed its pipe to exit
_context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and locks


class Worker:
    """Hold one worker process and its current cell."""

    process: BaseProcess
    pipe: Connection
    ready: bool
    """Whether it has reported that it can take cells, of which it holds at most one."""

    def __init__(self, place: Place, run: Run, keep_checkpoints: bool) -> None:
        self.place, self._run, self._keep = place, run, keep_checkpoints
        self.cell: Cell | None = None
        self.start()

    def start(self) -> None:
        """Start the process, or a replacement."""
        self.ready = False
        self.pipe, theirs = _context.Pipe()
        arguments = (theirs, self.place, self._run, self._keep)
        self.process = _context.Process(target=work, args=arguments, daemon=True)
        resource_tracker.ensure_running()  # otherwise starting it would unblock the signals
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until it handles them (`work`)
        self.process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()  # otherwise the pipe would not close with the process

    def give(self, cell: Cell) -> None:
        """Give it a cell to train."""
        self.cell = cell
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, which `listen` will report
            self.pipe.send(cell.config)

    def listen(self) -> Outcome | None:
        """Receive its message: how its cell ended, or None if it is ready.

        Raises:
            EOFError, ConnectionResetError: it died.
            ValueError: it cannot start; says why.
        """
        said: Outcome | ValueError | None = self.pipe.recv()
        if isinstance(said, ValueError):
            raise said
        self.ready = True
        return said

    def ask_to_stop(self) -> None:
        """Ask it to save its cell and exit."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)

    def end(self) -> str:
        """Kill the process if needed, and return how it ended."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def visible_gpus() -> list[str]:
    """Return a value of CUDA_VISIBLE_DEVICES for each GPU that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def default_workers() -> int:
    """Return the number of GPUs, or of cores if there are none."""
    return len(visible_gpus()) or len(os.sched_getaffinity(0))


def places(count: int, log: Path) -> list[Place]:
    """Return where `count` workers run: on the GPUs in turn, or with one CPU thread each."""
    gpus = visible_gpus()
    return [Place(gpus[number % len(gpus)] if gpus else None, log) for number in range(count)]


def run_all(
    cells: Sequence[Cell], where: Sequence[Place], run: Run, keep: bool, stop: StopRequest, tell: Report
) -> None:
    """Train every cell in order, with one worker per place, until all have ended or were stopped on request.

    Args:
        cells: distinct runs.
        where: a place for each worker.
        run: what a worker does with a cell.
        keep: keep the checkpoints of finished cells.
        stop: once it is set, the workers save their cells and exit.
        tell: called with the outcome of each cell.

    Raises:
        ValueError: no worker can start; if only some cannot, their places stay empty.
    """
    waiting = list(cells)
    workers = [Worker(place, run, keep) for place in where[: len(waiting)]]
    try:
        while waiting or any(worker.cell for worker in workers):
            for worker in workers:
                if stop:
                    worker.ask_to_stop()  # repeatedly: one that has just started may not have handled it yet
                elif waiting and worker.ready and worker.cell is None:
                    worker.give(waiting.pop(0))
            if stop and not any(worker.cell for worker in workers):
                break
            heard = wait([worker.pipe for worker in workers if not worker.pipe.closed], timeout=POLL_SECONDS)
            for worker in [worker for worker in workers if worker.pipe in heard]:
                try:
                    _listen(worker, waiting, stop, tell)
                except ValueError as error:
                    worker.end()
                    workers.remove(worker)
                    if not workers:
                        raise
                    LOG.warning(f"{error}; the sweep goes on with {len(workers)} worker(s)")
    finally:
        for worker in workers:
            worker.end()


def _listen(worker: Worker, waiting: list[Cell], stop: StopRequest, tell: Report) -> None:
    """Report how a worker's cell ended. A worker that died is replaced, and its cell counts as failed.

    So is one whose cell failed: the GPU may take no more work after such an error, and still holds the cell's memory.
    """
    cell = worker.cell
    try:
        outcome = worker.listen()
    except (EOFError, ConnectionResetError):
        worker.process.join(EXIT_SECONDS)  # its pipe closes a moment before it ends; `end` would be how it ended
        how = worker.end()
        if not (worker.ready or stop):
            raise ValueError(f"a worker ended before it could start ({how}): see {worker.place.log}") from None
        if cell is not None and not stop:
            cell.config.run.folder.mkdir(parents=True, exist_ok=True)
            write_whole(cell.config.run.folder / ERROR, f"the worker that trained it died: {how}\n")
            tell(cell, "failed")
        worker.cell = None
        if not stop:
            worker.start()
        return
    worker.cell = None
    if cell is None or outcome is None:
        return
    if outcome == "failed":
        worker.end()
        if not stop:
            worker.start()
    if outcome == "stopped" and not stop:  # only this worker was asked to stop: another continues the cell
        waiting.insert(0, cell)
    else:
        tell(cell, outcome)
