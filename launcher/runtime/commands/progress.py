"""Show a command's progress through many similar items: a bar on a terminal, an occasional line in a log."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from plumbline.launcher.runtime.commands.cli import duration
from plumbline.launcher.runtime.system.log import LOG

LOG_SECONDS = 30.0  # between lines in a log
Thing = TypeVar("Thing")


def watched(things: Iterable[Thing], total: int, unit: str) -> Iterator[Thing]:
    """Yield things, and show how many are done, and how long the rest may take.

    Args:
        things: the items to process, one after the other.
        total: number of items.
        unit: name of an item.
    """
    bar = tqdm(things, total=total, unit=unit, file=sys.stderr, disable=None)
    if not bar.disable:
        yield from bar
        return
    begun = told = time.monotonic()
    for done, thing in enumerate(things, start=1):
        yield thing
        now = time.monotonic()
        if now - told >= LOG_SECONDS and done < total:
            told = now
            LOG.info(f"{unit} {done}/{total}, eta {duration((now - begun) / done * (total - done))}")
