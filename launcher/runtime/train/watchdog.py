"""End a run that hangs, after every rank has written its stacks, and name the rank that the others wait for.

A collective waits for the slowest rank. When a rank is frozen, stuck in its own work or has died silently, the others
wait in the same call until its timeout, and no error says for which rank. So each rank watches itself: when it has made
no progress for `train.hang_minutes`, it writes the stacks of its threads to a file, and on a GPU its last collectives
to another. The others wait for each rank that wrote nothing, or that is not in a collective while others are.
"""

import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch._C import _distributed_c10d

from plumbline.launcher.runtime.cluster.attempts import FROZEN, accuse
from plumbline.launcher.runtime.cluster.nodes import node_name, own_job
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.exit_codes import HUNG
from plumbline.launcher.runtime.system.log import LOG

GRACE = 5.0  # seconds for all ranks to write their stacks, since they do not notice the hang at the same moment
PATIENCE = 30.0  # further seconds that writing may take: the disk may be the cause of the hang
STOOD_STILL = 10
"""Times its usual pause after which the watch knows that the whole process was stopped: Ctrl-Z, a suspended job."""
COLLECTIVE = ("torch/distributed/", "deepspeed/comm/", "runtime/ranks/collectives.py")
"""Parts of file names in the stack of a rank that waits for others."""
FOR_THE_DEVICE = (
    "torch/cuda/",
    "torch/autograd/graph.py",
    "deepspeed/runtime/",
    "launcher/runtime/engine/",
    "launcher/runtime/train/evaluation.py",
    "launcher/runtime/train/guards/",
)
"""Parts of file names in the stack of a rank that waits for its GPU, which may itself be waiting for other ranks: all
places that read a number from the GPU. In a backward pass, a thread of autograd does."""
TRACE = "nccl_trace_rank_"
"""Prefix of the names of files with the last collectives, for which torchfrtrace looks."""


class Watchdog:
    """Watch this process from a thread.

    It begins before the ranks connect, because no other rank notices one that dies until they have.

    Args:
        folder: folder for the stacks, shared by all ranks.
        world: this process among all; the process group need not be up.
        minutes: how long there may be no progress; None disables the watchdog.
        end: ends the process with an exit code. It must not raise an exception, which would end only the thread.
    """

    def __init__(
        self, folder: Path, world: World, minutes: float | None, end: Callable[[int], object] = os._exit
    ) -> None:
        self._folder, self._world, self._minutes, self._end = folder, world, minutes, end
        self._stopped = threading.Event()
        self._nodes = ["" for _ in range(world.size)]
        self._doing, self._since = "meeting the other ranks", time.monotonic()
        self.tell: Callable[[int, str], object] | None = None
        """Called with exit code and reason before the process ends."""
        if minutes is not None:
            threading.Thread(target=self._watch, args=(60 * minutes,), daemon=True).start()

    def __enter__(self) -> "Watchdog":
        """Return this watchdog."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self.stop()

    def ranks_have_met(self) -> None:
        """Gather the nodes of all ranks, and put earlier files aside. Collective, under the run's lock."""
        if self._minutes is None:
            return
        if self._world.is_main:
            with suppress(OSError):
                if self._folder.exists():
                    before = self._folder.with_name(f"{self._folder.name}.before")
                    shutil.rmtree(before, ignore_errors=True)
                    self._folder.rename(before)
            shutil.rmtree(self._folder, ignore_errors=True)  # if not renamed: nobody may take it for this attempt's
        self._nodes = gather_objects(node_name(), self._world)  # after which the folder is empty
        self.beat("starting")

    def beat(self, doing: str) -> None:
        """Record that this process makes progress, and what it does next."""
        self._doing, self._since = doing, time.monotonic()

    def suspend(self) -> None:
        """Allow any time until the next beat."""
        self._since = math.inf

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self, seconds: float) -> None:
        pause, looked = min(1.0, seconds / 10), time.monotonic()
        while not self._stopped.wait(pause):
            now = time.monotonic()
            if now - looked > STOOD_STILL * pause:
                self._since = max(self._since, now)  # training could not move either
            looked = now
            if now - self._since > seconds:
                last_words = threading.Thread(target=self._say, args=(seconds,), daemon=True)
                last_words.start()
                last_words.join(GRACE + PATIENCE)
                self._end(HUNG)
                return

    def _say(self, seconds: float) -> None:
        """Report the hang, and record it in the status of the run, as far as the disk permits."""
        try:
            self._report(seconds)
        except OSError as error:
            LOG.error(f"nothing moved for {self._minutes:g} minutes while {self._doing}; no stacks: {error}")
        finally:
            if self.tell is not None:
                self.tell(HUNG, f"nothing moved for {self._minutes:g} minutes (train.hang_minutes): see stacks/")
        if self._world.device.type == "cuda":
            # The device may block the call, which holds up all of Python: the alarm ends the process without Python
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            self._write_trace()
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _report(self, seconds: float) -> None:
        """Write the stacks of this rank; then, on one rank, log which rank all others wait for."""
        self._folder.mkdir(parents=True, exist_ok=True)
        mine = _file(self._folder, self._world.rank)
        mine.write_text(f"rank {self._world.rank} on {node_name()}, {self._doing}\n\n{stacks()}", encoding="utf-8")
        time.sleep(GRACE)
        # Older files are of an earlier attempt; they are still there if this one did not reach `ranks_have_met`
        oldest = mine.stat().st_mtime - seconds
        ranks = {_file(self._folder, rank): rank for rank in range(self._world.size)}
        there = (file for file in sorted(self._folder.iterdir()) if file in ranks)
        fresh = (file for file in there if file.stat().st_mtime > oldest)
        first = next(fresh)
        if first == mine:  # only the lowest rank reports: hundreds of ranks would each read the files of all
            self._tell_of_all({ranks[file]: file.read_text(encoding="utf-8") for file in (first, *fresh)})

    def _tell_of_all(self, texts: Mapping[int, str]) -> None:
        """Log which ranks the others wait for, by their stacks, and accuse the nodes of ranks that wrote none."""
        waits = (*COLLECTIVE, *(FOR_THE_DEVICE if self._world.device.type == "cuda" else ()))
        why = "; ".join(suspects(texts, self._nodes, waits)) or "no rank stands apart from the others"
        LOG.error(
            f"nothing moved for {self._minutes:g} minutes while {self._doing} (train.hang_minutes): {why}; "
            f"stacks in {self._folder}"
        )
        silent = [node for rank, node in enumerate(self._nodes) if node and rank not in texts]
        # If half of the ranks or more are silent, this rank may be the one that hangs, not they
        if own_job() is not None and 2 * len(silent) < self._world.size:
            accuse(self._folder.parent / "slurm", sorted({*silent}), FROZEN)

    def _write_trace(self) -> None:
        """Write the last collectives of this rank, last of all, since a broken device may not respond."""
        try:
            trace = last_collectives()
            if trace is not None:
                (self._folder / f"{TRACE}{self._world.rank}").write_bytes(trace)
        except (RuntimeError, OSError) as error:
            LOG.error(f"the last collectives of rank {self._world.rank} are not known: {error}")


def watch(config: Config, world: World) -> Watchdog:
    """Return a watchdog for this process of a run, as its configuration says."""
    return Watchdog(config.run.folder / "stacks", world, config.train.hang_minutes)


def stacks() -> str:
    """Return the stack of each thread of this process, the main thread first, innermost calls last.

    Threads started by C++ are included, without a name: in one of them a backward pass on a GPU calls hooks.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    return "\n".join(
        f"{names.get(ident, 'not of Python')}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )


def last_collectives() -> bytes | None:
    """Return NCCL's collectives from torch's flight recorder, for torchfrtrace, or None if torch lacks NCCL."""
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    return None if dump is None else dump()


def suspects(texts: Mapping[int, str], nodes: Sequence[str], waits: Sequence[str] = COLLECTIVE) -> list[str]:
    """Return a description of each rank that the others wait for: it wrote nothing, or is not in a collective.

    Args:
        texts: rank -> the text that it wrote.
        nodes: names of the nodes of all ranks; empty names if the ranks have not connected.
        waits: parts of file names in the stack of a rank that waits.
    """
    named = [f"rank {rank} on {node}" if node else f"rank {rank}" for rank, node in enumerate(nodes)]
    silent = [
        f"{name} wrote nothing: it is frozen or dead, or its node is"
        for rank, name in enumerate(named)
        if rank not in texts
    ]
    outside = [
        f"{named[rank]} is not in a collective but in {_innermost(text)}"
        for rank, text in sorted(texts.items())
        if not any(part in _main_stack(text) for part in waits)
    ]
    return silent + (outside if len(outside) < len(texts) else [])


def _main_stack(text: str) -> str:
    """Return the stack of the main thread, which is the first in a rank's file."""
    return text.split("\n\n", 2)[1]


def _innermost(text: str) -> str:
    """Return the last call of the main thread: file, line and function."""
    return [line.strip() for line in _main_stack(text).splitlines() if line.strip().startswith("File ")][-1]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.txt"
