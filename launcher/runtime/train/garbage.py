"""Collect Python's garbage when training pauses anyway, not during a step.

The interpreter collects cycles whenever enough objects were created, at a different time on each rank, and all other
ranks wait meanwhile. A step leaves no tensor in a cycle (`tests/distributed/test_step_budget.py`), so memory does not
grow between collections.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

STEPS = 1000  # between collections if training does not pause


@contextmanager
def left_alone() -> Iterator[None]:
    """Disable automatic collection in this context, so that only `collect` collects garbage."""
    automatic = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if automatic:
            gc.enable()


def collect(step: int | None = None) -> None:
    """Collect young objects: now, or if `step` is given, only at every STEPS steps."""
    if step is None or step % STEPS == 0:
        gc.collect(1)


def collect_engine() -> None:
    """Collect an engine that was closed: it has reference cycles, some behind hooks that the first collection frees."""
    for _ in range(2):
        gc.collect()
