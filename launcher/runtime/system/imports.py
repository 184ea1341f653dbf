"""Import without looking for garbage: what imports make lives as long as the process.

Torch and what is imported beside it are some 400,000 objects. The collector would look through them again and again
while they are made, and once more at the end: a sixth of the processor time of a short command (`plan.py`).
"""

import gc


def begin() -> None:
    """Collect no cycles until `end`."""
    gc.disable()


def end() -> None:
    """Collect cycles again, but none of what exists by now, for as long as this process lives."""
    gc.freeze()
    gc.enable()
