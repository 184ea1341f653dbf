"""Write and publish a snapshot; the ranks agree on whether all of them have written."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from plumbline.launcher.runtime.checkpoint.publishing import make_room, prune, publish, staging_folder, write_files
from plumbline.launcher.runtime.checkpoint.snapshot import Snapshot
from plumbline.launcher.runtime.checkpoint.store import CheckpointError, step_folder
from plumbline.launcher.runtime.config.sections import CheckpointConfig
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.world import World

Result = TypeVar("Result")


@dataclass
class Pace:
    """Count the progress of a save, so that a waiting thread can tell a slow one from a stuck one."""

    parts: int = 0
    """Number of parts of files that this rank has synced to disk."""
    waits: bool = False
    """Whether this rank waits for others, which cannot take longer than the timeout of their process group."""

    def beat(self) -> None:
        """Count a part."""
        self.parts += 1


def commit(
    snapshot: Snapshot,
    root: Path,
    keep: CheckpointConfig,
    world: World,
    group: dist.ProcessGroup | None,
    pace: Pace,
) -> Path:
    """Write and publish a snapshot, and return its folder. Collective: the ranks agree on whether all have written.

    Args:
        snapshot: this rank's snapshot; all ranks took theirs at the same step.
        root: the folder of the run's checkpoints.
        keep: which of them to keep.
        world: this process among all.
        group: process group for the ranks to agree over: a separate one outside the training thread, else None.
        pace: updated with the progress of the save.

    Raises:
        CheckpointError: a rank could not write (no space left, no permission); earlier checkpoints are unchanged.
    """
    step = snapshot.facts["step"]
    staging: Path = gather_objects(staging_folder(root, step), world, group)[0]

    def publish_all() -> None:
        files = {name: facts for share in written for name, facts in share.items()}
        publish(staging, snapshot.facts, files)
        prune(root, step, keep, pace.beat)

    def agree(action: Callable[[], Result]) -> list[Result]:
        return write_on_all_ranks(action, root, [f"rank {rank}" for rank in range(world.size)], world, group, pace)

    def on_main(action: Callable[[], None]) -> None:
        agree(action if world.is_main else lambda: None)

    try:
        on_main(lambda: make_room(staging))
        written = agree(lambda: write_files(snapshot.files, staging, pace.beat))
        on_main(publish_all)
    except CheckpointError:
        if world.is_main:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    return step_folder(root, step)


def write_on_all_ranks(
    action: Callable[[], Result],
    root: Path,
    names: Sequence[str],
    world: World,
    group: dist.ProcessGroup | None,
    pace: Pace,
) -> list[Result]:
    """Run `action` on every rank and return the results of all; if it fails on one, fail on all with one message.

    Args:
        action: writes this rank's files.
        root: the folder that it writes to.
        names: names of the ranks, for the message.
        world: this process among all.
        group: process group for the ranks to agree over.
        pace: set to waiting when this rank waits for the others.

    Raises:
        CheckpointError: on all ranks; names those that could not write.
    """
    result, error = None, None
    try:
        result = action()
    except OSError as problem:
        error = f"{type(problem).__name__}: {problem}", _free_space(root)
    pace.waits = True
    try:
        answers = gather_objects((result, error), world, group)
    finally:
        pace.waits = False
    results, errors = zip(*answers, strict=True)
    failed = [(name, *error) for name, error in zip(names, errors, strict=True) if error]
    if failed:
        named = "; ".join(f"{name}: {message}" for name, message, _ in failed)
        raise CheckpointError(
            f"{root}: checkpoint not written ({named}); {failed[0][2]}. "
            "Earlier checkpoints are whole: free some space there"
        )
    return list(results)


def _free_space(root: Path) -> str:
    """Return how much space is free where a folder is, or would be; the file system may be unavailable."""
    for folder in (root, *root.parents):
        try:
            return f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB are free there"
        except OSError:
            continue
    return "how much is free there cannot be told"
