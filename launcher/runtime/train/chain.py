"""Record in chain.jsonl what each step trained on and reported, and which checkpoints were saved.

Each rank hashes its own samples on the host while the device computes the step. The digests are summed over ranks every
TOGETHER steps, in an asynchronous message, and before a checkpoint, where training waits anyway.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from plumbline.launcher.runtime.checkpoint.store import MANIFEST, checkpoints, step_of
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.ranks.collectives import LateSum, from_main
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.chain import ChainFile, Step, digest_of, from_limbs, in_hex, to_limbs
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.objectives.objective import Batch

TOGETHER = 100
"""Steps whose digests are summed over ranks in one message, 64 bytes per step."""


class Reported(NamedTuple):
    """Hold what a step reported, and the digest of this rank's samples in it."""

    step: int
    loss: float
    grad_norm: float
    digest: int


class SummedDigests:
    """Sum the digests of some steps over ranks. Creating one is collective; `read` is not."""

    def __init__(self, digests: Sequence[int], world: World) -> None:
        limbs = torch.tensor([to_limbs(digest) for digest in digests], dtype=torch.int64).flatten()
        self._count = len(digests)
        self._sum = LateSum(limbs.to(world.device, non_blocking=True), limbs.new_empty(0, device=world.device))

    def read(self) -> list[str]:
        """Return the digest of each step over all ranks, as the chain stores it."""
        sums = self._sum.read()
        size = len(sums) // self._count
        return [in_hex(from_limbs(sums[first : first + size])) for first in range(0, len(sums), size)]


class ChainWriter:
    """Keep the chain of a run. All ranks create one together; the main one writes.

    Args:
        folder: the run folder.
        world: this process among all; the process group must be up.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self._folder, self._world = folder, world
        self._file: ChainFile | None = None
        self._fed: deque[int] = deque()
        """Digests of steps whose results are not read yet."""
        self._reported: list[Reported] = []
        self._sent: tuple[list[Reported], SummedDigests] | None = None
        self._begun = 0
        """Step that training (re)started from."""

    def open(self, step: int) -> None:
        """Begin to write from `step`, where training (re)starts. Collective."""
        self._fed.clear()
        self._reported, self._sent, self._begun = [], None, step

        def on_main() -> None:
            if self._file is not None:
                self._file.close()
            self._file = ChainFile(self._folder, step)

        from_main(on_main, self._world)

    def feed(self, batches: Sequence[Batch]) -> None:
        """Hash this rank's samples of the step in progress."""
        self._fed.append(digest_of(batches))

    def after_step(self, step: int, result: StepResult) -> None:
        """Record the result of the oldest unread step. Collective at every TOGETHER steps."""
        self._write()
        self._reported.append(Reported(step, result.loss.item(), result.grad_norm, self._fed.popleft()))
        if step % TOGETHER == 0:
            self._send()

    def catch_up(self, written: int | None) -> None:
        """Write all steps that have reported, then the newest checkpoint. Collective.

        No checkpoint may be being written.

        Args:
            written: step of the last checkpoint that this process wrote, or 0 if none. None if the call depends on
                timing, as for checkpoints on the nodes, so that the same run always writes the same chain.
        """
        self._write()
        if self._reported:
            self._send()
            self._write()
        if written is not None:
            self._note_checkpoint(written)

    def close(self, written: int) -> None:
        """Write the newest checkpoint, with `written` as for `catch_up`, and close the file."""
        self._note_checkpoint(written)
        if self._file is not None:
            self._file.close()

    def _send(self) -> None:
        self._sent = self._reported, SummedDigests([its.digest for its in self._reported], self._world)
        self._reported = []

    def _write(self) -> None:
        """Write the steps whose digests are being summed."""
        if self._sent is None:
            return
        (reported, digests), self._sent = self._sent, None
        samples = digests.read()
        if self._file is not None:
            for its, summed in zip(reported, samples, strict=True):
                self._file.add_step(Step(its.step, summed, its.loss, its.grad_norm))

    def _note_checkpoint(self, written: int) -> None:
        """Write the newest checkpoint, except one of a later step that a resume skipped: it will be made again."""
        if self._file is None:
            return
        root, last = self._folder / CHECKPOINTS, max(self._begun, written)
        try:
            for folder in [each for each in checkpoints(root) if step_of(each) <= last][:1]:
                self._file.add_checkpoint(step_of(folder), folder / MANIFEST)
        except OSError as error:
            LOG.warning(f"the newest checkpoint in {root} is not noted in {self._file.path} ({error})")
