"""Show the progress of a long pass over text: a bar on a terminal, occasional lines in a log."""

import logging
import sys
import time

from tqdm import tqdm

LOG = logging.getLogger(__name__)
LOG_INTERVAL = 30.0
"""Seconds between lines in a log."""


class Progress:
    """Count bytes of text."""

    def __init__(self, label: str, total: int | None) -> None:
        """Start counting.

        Args:
            label: What is being done.
            total: Bytes in total, or None if unknown.
        """
        self._bar = tqdm(desc=label, total=total, unit="B", unit_scale=True, file=sys.stderr, disable=None, leave=False)
        self._label = label
        self._total = total
        self._done = 0
        self._started = self._last = time.monotonic()

    def update(self, count: int) -> None:
        """Count `count` more bytes."""
        self._done += count
        self._bar.update(count)
        now = time.monotonic()
        if self._bar.disable and now - self._last > LOG_INTERVAL:
            self._last = now
            of_total = f" of {self._total / 1e6:,.0f}" if self._total else ""
            speed = self._done / 1e6 / (now - self._started)
            LOG.info(f"{self._label}: {self._done / 1e6:,.0f}{of_total} MB, {speed:,.1f} MB/s")

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.close()
