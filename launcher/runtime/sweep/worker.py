"""Run a worker of a sweep: a process that imports torch and DeepSpeed once and trains cells one after another.

A cell is trained by the same loop as any other run, in a world of one, and ends in one of four ways, each written into
its run folder before it is reported: `result.json` (finished), `diverged.json` (finished: this setting does not train),
`error.txt` (failed, and tried again next time), or a checkpoint (stopped on request). Its run folder is locked
meanwhile, so any number of processes can work on one sweep, and has the status of every other run.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from plumbline.data.disk import is_file
from plumbline.launcher.runtime.checkpoint.newest import newest_checkpoint
from plumbline.launcher.runtime.checkpoint.store import checkpoints, newest_whole, problems
from plumbline.launcher.runtime.cluster.launch import restart_count
from plumbline.launcher.runtime.config.load import config_in
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, be_alone, read_world
from plumbline.launcher.runtime.run.inputs import Inputs, open_inputs
from plumbline.launcher.runtime.run.lock import LEASE_SECONDS, RunLockedError, hold
from plumbline.launcher.runtime.run.status import RunStatus
from plumbline.launcher.runtime.run.status_file import RESULT, STATUS
from plumbline.launcher.runtime.sweep.advance import DIVERGED
from plumbline.launcher.runtime.system import determinism
from plumbline.launcher.runtime.system.exit_codes import BROKEN, COMPLETE, CRASHED, REQUEUE
from plumbline.launcher.runtime.system.files import write_json, write_whole
from plumbline.launcher.runtime.system.signals import SIGNALS, StopRequest
from plumbline.launcher.runtime.train import garbage
from plumbline.launcher.runtime.train.guards.guard import TrainingError

Run = Callable[[Config, Inputs, World, StopRequest, RunStatus], bool]  # as train() of train/train.py
Outcome = Literal["finished", "diverged", "failed", "stopped", "elsewhere"]
FINISHED: tuple[Outcome, ...] = ("finished", "diverged")  # never trained again
ERROR, LOG_FILE = "error.txt", "log.txt"
TIMEOUT_MINUTES = 30.0  # of collectives, which do not wait in a world of one


@dataclass(frozen=True)
class Place:
    """Describe where a worker runs."""

    gpu: str | None
    """Value of the worker's CUDA_VISIBLE_DEVICES, or None for one CPU thread."""
    log: Path
    """File for output outside of cells."""


def work(pipe: Connection, place: Place, run: Run, keep_checkpoints: bool) -> None:
    """Train each configuration received and send back how it ended, until the pipe closes or it must stop."""
    tqdm.set_lock(threading.RLock())  # the default also has a semaphore, which a killed worker leaks
    stop = StopRequest()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    with contextlib.suppress(KeyboardInterrupt), _output_to(place.log):
        try:
            world = _start(place)
        except ValueError as error:  # a problem of the machine, worded for people
            pipe.send(error)
            return
        pipe.send(None)  # ready
        while not stop:
            try:
                config: Config = pipe.recv()
            except EOFError:
                break
            pipe.send(run_cell(config, world, stop, run, keep_checkpoints))
    # Not a return: gloo's threads outlive the process group and can abort the interpreter's shutdown
    os._exit(0)


def run_cell(config: Config, world: World, stop: StopRequest, run: Run, keep_checkpoints: bool) -> Outcome:
    """Train one cell in its run folder, resuming it if it was begun; its output goes to log.txt there.

    Returns:
        How it ended, or "elsewhere" if another process is training it.
    """
    folder = config.run.folder
    try:
        # In this job, only an earlier attempt could still hold the cell
        patience = LEASE_SECONDS if restart_count() else 0.0
        with hold(folder, patience, folder / STATUS) as is_ours, _output_to(folder / LOG_FILE):
            ended = outcome_of(config)
            if ended in FINISHED:  # by another process, since the list of cells was made
                return ended
            (folder / ERROR).unlink(missing_ok=True)
            with RunStatus(folder, 1, newest_checkpoint, is_ours, since=time.time()) as status:
                outcome, code, why = _train(config, world, stop, run, status)
                if outcome in FINISHED and not keep_checkpoints:
                    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
                status.end(code, why)
    except RunLockedError:
        return "elsewhere"
    garbage.collect_engine()
    if "torch._dynamo" in sys.modules:  # graphs of finished cells count towards the limit beyond which none is compiled
        sys.modules["torch._dynamo"].reset()
    return outcome


def _train(config: Config, world: World, stop: StopRequest, run: Run, status: RunStatus) -> tuple[Outcome, int, str]:
    """Train a cell, and return how it ended: for the sweep, and as exit code and reason."""
    folder = config.run.folder
    try:
        config = _as_begun(config)
        determinism.enforce(config.run.repeats, world.device)
        if run(config, open_inputs(config, world), world, stop, status):
            return "finished", COMPLETE, "complete"
        return "stopped", REQUEUE, f"stopped {stop.reason}"
    except TrainingError as error:
        write_json(folder / DIVERGED, {"message": str(error)})
        return "diverged", BROKEN, str(error)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        write_whole(folder / ERROR, f"{why}\n\n{traceback.format_exc()}")
        return "failed", CRASHED, why


def outcome_of(config: Config) -> Outcome | None:
    """Return how a configuration's run ended, from its folder, or None if not begun or killed before it saved."""
    folder = config.run.folder
    if is_file(folder / RESULT):
        return "finished"
    if is_file(folder / DIVERGED):
        return "diverged"
    if is_file(folder / ERROR):
        return "failed"
    return "stopped" if checkpoints(folder / CHECKPOINTS) else None


def why_failed(config: Config) -> str:
    """Return why a configuration's run failed, in one line, unless another process has just restarted it."""
    try:
        return (config.run.folder / ERROR).read_text(encoding="utf-8").splitlines()[0]
    except FileNotFoundError:
        return "another process is trying it again"


def _as_begun(config: Config) -> Config:
    """Return a configuration with the parameterization with which its run was begun, since rules can share a run."""
    newest = newest_whole(checkpoints(config.run.folder / CHECKPOINTS), problems, warn=False)  # the loop warns
    if newest is None:
        return config
    begun = config_in(newest)
    return config.model_copy(update={"parameterization": begun.parameterization})


def _start(place: Place) -> World:
    """Start a world of one, regardless of the job or launcher around the sweep."""
    if place.gpu is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # run.deterministic needs it before CUDA starts
    be_alone()
    world = read_world()
    process_group.join(world, TIMEOUT_MINUTES)
    return world


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Append the output of this process, including C++ libraries, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), saved, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
