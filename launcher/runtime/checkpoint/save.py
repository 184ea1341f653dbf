"""Write and publish a snapshot; the ranks agree on whether all of them have written."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from plumbline.launcher.runtime.checkpoint.commit import make_room, publish, staging_folder, write_files
from plumbline.launcher.runtime.checkpoint.snapshot import Snapshot
from plumbline.launcher.runtime.checkpoint.store import CheckpointError, step_folder
from plumbline.launcher.runtime.config.sections import CheckpointConfig
from plumbline.launcher.runtime.system.collectives import gather_objects
from plumbline.launcher.runtime.system.world import World

Result = TypeVar("Result")


def commit(
    snapshot: Snapshot, root: Path, keep: CheckpointConfig, world: World, group: dist.ProcessGroup | None = None
) -> Path:
    """Write and publish a snapshot, and return its folder. Collective: the ranks agree on whether all have written.

    Args:
        snapshot: of all ranks, taken at the same step.
        root: the folder of the run's checkpoints.
        keep: which of them stay.
        world: this process among all.
        group: over which they agree, where another thread than that of training calls.

    Raises:
        CheckpointError: a rank could not write (no space left, no permission); the earlier checkpoints are untouched.
    """
    step = snapshot.facts["step"]
    staging: Path = gather_objects(staging_folder(root, step), world, group)[0]

    def publish_all() -> None:
        files = {name: facts for share in written for name, facts in share.items()}
        publish(staging, snapshot.facts, files, keep)

    def on_all(action: Callable[[], Result]) -> list[Result]:
        return _on_all(action, staging, world, group)

    def on_main(action: Callable[[], None]) -> None:
        on_all(action if world.is_main else lambda: None)

    on_main(lambda: make_room(staging))
    written = on_all(lambda: write_files(snapshot.files, staging))
    on_main(publish_all)
    return step_folder(root, step)


def _on_all(action: Callable[[], Result], staging: Path, world: World, group: dist.ProcessGroup | None) -> list[Result]:
    """Run `action` on every rank and return the results of all; if it fails on one, fail on all with one message."""
    result, error = None, None
    try:
        result = action()
    except OSError as problem:
        error = f"{type(problem).__name__}: {problem}"
    results, errors = zip(*gather_objects((result, error), world, group), strict=True)
    if any(errors):
        if world.is_main:
            shutil.rmtree(staging, ignore_errors=True)
        named = "; ".join(f"rank {rank}: {message}" for rank, message in enumerate(errors) if message)
        folder = next(parent for parent in staging.parents if parent.is_dir())
        free = shutil.disk_usage(folder).free / 2**30
        raise CheckpointError(
            f"{staging.parent}: checkpoint not written ({named}); {free:.2f} GiB are free there. "
            "Earlier checkpoints are whole: free some space there"
        )
    return list(results)
