"""Keep how long the last save of a run took, for whoever chooses its next notice."""

import json
from contextlib import suppress
from pathlib import Path

from plumbline.launcher.runtime.system.files import write_json

FILE = "save_time.json"


def record(folder: Path, step: int, seconds: float) -> None:
    """Write down in the run folder how long the checkpoint of a step was being written."""
    with suppress(OSError):  # advice is no reason to end a run
        write_json(folder / FILE, {"step": step, "seconds": round(seconds, 2)})


def read(folder: Path) -> float | None:
    """Return the seconds of the last save, None before the first."""
    file = folder / FILE
    return float(json.loads(file.read_text(encoding="utf-8"))["seconds"]) if file.exists() else None
