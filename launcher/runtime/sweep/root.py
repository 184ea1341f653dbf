"""Say where a sweep lies, by values of its file that nobody has checked. Nothing here imports torch."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.config.written import read_run

USUAL = "runs/sweeps"
"""Where sweeps of runs in runs/ lie; once all did."""


def root_of(sweep: Mapping[str, Any], file: Path) -> str:
    """Return the folder of sweep folders: `root`, or `sweeps` in the run.root of the base; USUAL, if this one is there.

    Args:
        sweep: keys and values.
        file: that holds them, to which `base` is relative.
    """
    if "root" in sweep:
        return str(sweep["root"])
    if not os.path.isdir(f"{USUAL}/{sweep.get('name')}/runs"):  # noqa: PTH112 - a name may be anything yet
        with suppress(ValueError, OSError):  # whoever reads the base tells what is wrong with it
            return str(Path(read_run(file.parent / str(sweep.get("base")), []).root) / "sweeps")
    return USUAL
