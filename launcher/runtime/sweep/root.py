"""Find the folder of a sweep from the unchecked values of its file, without importing torch."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.config.written import read_run

USUAL = "runs/sweeps"
"""Default folder where the base does not say another."""


def root_of(sweep: Mapping[str, Any], file: Path) -> str:
    """Return the folder of sweep folders: `root`, else `sweeps` in the base's run.root.

    Args:
        sweep: keys and values.
        file: the file that holds them, to which `base` is relative.
    """
    if "root" in sweep:
        return str(sweep["root"])
    with suppress(ValueError, OSError):  # the code that reads the base reports what is wrong with it
        return str(Path(read_run(file.parent / str(sweep.get("base")), []).root) / "sweeps")
    return USUAL
