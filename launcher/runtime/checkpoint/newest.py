"""Find the newest checkpoint of a run and when it was written, without verifying it or importing torch."""

from pathlib import Path

from plumbline.launcher.runtime.checkpoint.store import MANIFEST, checkpoints, step_of
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.run.status_file import SavedCheckpoint


def newest_checkpoint(run: Path) -> SavedCheckpoint | None:
    """Return the newest checkpoint in a run folder, unverified, or None if there is none."""
    for folder in checkpoints(run / CHECKPOINTS):
        try:
            return SavedCheckpoint(step_of(folder), (folder / MANIFEST).stat().st_mtime)
        except OSError:  # it is being deleted, or damaged
            continue
    return None


def newest_step(run: Path) -> int:
    """Return the step of a run's newest checkpoint, or 0 without one."""
    return next(map(step_of, checkpoints(run / CHECKPOINTS)), 0)
