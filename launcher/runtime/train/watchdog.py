"""End a run in which nothing moves, once every rank has written where it stands, and name the rank that holds it up.

A collective waits for the last rank. When one is frozen, stuck in its own work or gone without a word, the others wait
in the same call until its timeout, and nothing says for whom. So each rank watches itself: when it has not moved for
`train.hang_minutes`, it writes the stacks of its threads to a file of its own, and on a GPU its last collectives to
another. Whoever wrote nothing, or stands anywhere but in a collective while others do, is what they wait for.
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
from pathlib import Path

from torch._C import _distributed_c10d

from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.system.attempts import FROZEN, accuse
from plumbline.launcher.runtime.system.collectives import gather_objects
from plumbline.launcher.runtime.system.exit_codes import HUNG
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.nodes import node_name, own_job
from plumbline.launcher.runtime.system.world import World

GRACE = 5.0  # seconds that ranks have to write, which do not notice at the same moment
PATIENCE = 30.0  # seconds that writing may take beyond that: the disk may be what hangs
COLLECTIVE = ("torch/distributed/", "deepspeed/comm/", "runtime/system/collectives.py")
"""Parts of file names by which a rank that waits for others is known."""
FOR_THE_DEVICE = (
    "torch/cuda/",
    "torch/autograd/graph.py",
    "deepspeed/runtime/",
    "launcher/runtime/engine/",
    "launcher/runtime/train/evaluation.py",
    "launcher/runtime/train/guards/",
)
"""The same of a rank that may wait for its GPU, and so, for all that it knows, for others: wherever a number is read
from there. In a backward pass a thread of autograd's does."""
TRACE = "nccl_trace_rank_"
"""What names of files with the last collectives begin with: what torchfrtrace looks for."""


class Watchdog:
    """Watch this process from a thread, from its start on: a rank that dies before ranks have met is missed by nobody.

    Args:
        folder: where stacks go, shared by all ranks.
        world: this process among all; there need be no process group yet.
        minutes: how long nothing may move; None: no watching.
        end: ends the process with an exit code; not by an exception, which the loop would never see.
    """

    def __init__(
        self, folder: Path, world: World, minutes: float | None, end: Callable[[int], object] = os._exit
    ) -> None:
        self._folder, self._world, self._minutes, self._end = folder, world, minutes, end
        self._stopped = threading.Event()
        self._nodes = ["" for _ in range(world.size)]
        self._doing, self._since = "meeting the other ranks", time.monotonic()
        self.tell: Callable[[int, str], object] | None = None
        """Is told exit code and reason before the process ends."""
        if minutes is not None:
            threading.Thread(target=self._watch, args=(60 * minutes,), daemon=True).start()

    def __enter__(self) -> "Watchdog":
        """Return this watchdog."""
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        self.stop()

    def ranks_have_met(self) -> None:
        """Learn the nodes of all ranks and delete what an earlier attempt left. Collective, under the run's lock."""
        if self._minutes is None:
            return
        if self._world.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._nodes = gather_objects(node_name(), self._world)  # after which the folder is empty
        self.beat("starting")

    def beat(self, doing: str) -> None:
        """Note that this process goes on, and what it does next."""
        self._doing, self._since = doing, time.monotonic()

    def suspend(self) -> None:
        """Allow any time until the next beat."""
        self._since = math.inf

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _watch(self, seconds: float) -> None:
        while not self._stopped.wait(min(1.0, seconds / 10)):
            if time.monotonic() - self._since > seconds:
                last_words = threading.Thread(target=self._say, args=(seconds,), daemon=True)
                last_words.start()
                last_words.join(GRACE + PATIENCE)
                self._end(HUNG)
                return

    def _say(self, seconds: float) -> None:
        """Report, and tell the status of the run, as far as the disk lets."""
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
        """Write where this rank stands, then say of all ranks that wrote what holds them up."""
        self._folder.mkdir(parents=True, exist_ok=True)
        mine = _file(self._folder, self._world.rank)
        mine.write_text(f"rank {self._world.rank} on {node_name()}, {self._doing}\n\n{stacks()}", encoding="utf-8")
        time.sleep(GRACE)
        # What is older is of an earlier attempt, one that did not come as far as `ranks_have_met` either
        oldest = mine.stat().st_mtime - seconds
        ranks = {_file(self._folder, rank): rank for rank in range(self._world.size)}
        there = (file for file in sorted(self._folder.iterdir()) if file in ranks)
        fresh = (file for file in there if file.stat().st_mtime > oldest)
        first = next(fresh)
        if first == mine:  # the lowest rank speaks for all: each of hundreds would ask the disk for all files of all
            self._tell_of_all({ranks[file]: file.read_text(encoding="utf-8") for file in (first, *fresh)})

    def _tell_of_all(self, texts: Mapping[int, str]) -> None:
        """Say who holds the ranks up, by what each of them wrote, and accuse the nodes of those that wrote nothing."""
        waits = (*COLLECTIVE, *(FOR_THE_DEVICE if self._world.device.type == "cuda" else ()))
        why = "; ".join(suspects(texts, self._nodes, waits)) or "no rank stands apart from the others"
        LOG.error(
            f"nothing moved for {self._minutes:g} minutes while {self._doing} (train.hang_minutes): {why}; "
            f"stacks in {self._folder}"
        )
        silent = [node for rank, node in enumerate(self._nodes) if node and rank not in texts]
        # Of more it may be this rank that stands still, alone, while others bear with it
        if own_job() is not None and 2 * len(silent) < self._world.size:
            accuse(self._folder.parent / "slurm", sorted({*silent}), FROZEN)

    def _write_trace(self) -> None:
        """Write the last collectives of this rank, which asks a device that may be broken."""
        try:
            trace = last_collectives()
            if trace is not None:
                (self._folder / f"{TRACE}{self._world.rank}").write_bytes(trace)
        except (RuntimeError, OSError) as error:
            LOG.error(f"the last collectives of rank {self._world.rank} are not known: {error}")


def watch(config: Config, world: World) -> Watchdog:
    """Watch this process of a run as its configuration says."""
    return Watchdog(config.run.folder / "stacks", world, config.train.hang_minutes)


def stacks() -> str:
    """Return what each thread of this process is doing, the main thread first, innermost calls last.

    Those that C++ has started are among them, without a name: in one of these a backward pass on a GPU calls hooks.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    return "\n".join(
        f"{names.get(ident, 'not of Python')}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )


def last_collectives() -> bytes | None:
    """Return what torch's flight recorder has of NCCL, as torchfrtrace reads it; None: torch was built without NCCL."""
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    return None if dump is None else dump()


def suspects(texts: Mapping[int, str], nodes: Sequence[str], waits: Sequence[str] = COLLECTIVE) -> list[str]:
    """Say for which ranks the others wait: those that wrote nothing, and those that stand outside of a collective.

    Args:
        texts: rank -> what it wrote.
        nodes: of all ranks; empty where they have not met.
        waits: parts of file names by which a rank that waits is known.
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
    """Return the stack of the main thread of a rank's file, which comes first."""
    return text.split("\n\n", 2)[1]


def _innermost(text: str) -> str:
    """Return the last call of the main thread: file, line and function."""
    return [line.strip() for line in _main_stack(text).splitlines() if line.strip().startswith("File ")][-1]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.txt"
