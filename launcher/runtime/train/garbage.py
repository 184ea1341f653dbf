"""Collect Python's garbage where training pauses anyway, not amid a step.

The interpreter looks for cycles of dead objects whenever enough were made, on each rank at another time, and all ranks
wait for the one that does. A step leaves no tensor in such a cycle (`tests/distributed/test_step_budget.py`), so memory
does not grow without it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

STEPS = 1000  # after which it is collected where nothing else pauses


@contextmanager
def left_alone() -> Iterator[None]:
    """Collect garbage only where `collect` is called."""
    automatic = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if automatic:
            gc.enable()


def collect(step: int | None = None) -> None:
    """Collect the garbage of objects that are young: at a pause, or at every so many steps."""
    if step is None or step % STEPS == 0:
        gc.collect(1)
