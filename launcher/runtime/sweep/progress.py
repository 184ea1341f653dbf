"""Show the progress of a sweep: a bar on a terminal, a line per cell in a log."""

import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from plumbline.launcher.runtime.commands.cli import duration
from plumbline.launcher.runtime.sweep.cells import Cell
from plumbline.launcher.runtime.sweep.worker import Outcome
from plumbline.launcher.runtime.system.log import LOG


class Progress:
    """Count cells as they end."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._total, self._flops = len(cells), sum(cell.flops for cell in cells)
        self._ended, self._ended_flops = 0, 0.0
        self._started = time.monotonic()
        self._bar = tqdm(total=self._total, unit="run", file=sys.stderr, disable=None)

    def ended(self, cell: Cell, outcome: Outcome) -> None:
        """Count a cell. The time left is estimated by FLOPs."""
        self._ended += 1
        self._ended_flops += cell.flops
        left = (time.monotonic() - self._started) * (self._flops / self._ended_flops - 1)
        line = f"[{self._ended}/{self._total}] {outcome}: {cell} ({cell.signature}), eta {duration(left)}"
        self._bar.set_postfix_str(f"eta {duration(left)}", refresh=False)
        self._bar.update(1)
        if self._bar.disable:
            LOG.info(line)
        elif outcome != "finished":
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.close()
