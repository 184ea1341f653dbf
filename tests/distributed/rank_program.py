"""Share what a program of ranks begins and ends with: CONFIG and FOLDER, a process group, pretraining, a way out."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from plumbline.launcher import pretrain
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world


def begin() -> tuple[Path, Path, World]:
    """Return the configuration and the folder of the command line, and this rank, in a group with the others."""
    file, folder = map(Path, sys.argv[1:3])
    world = read_world()
    process_group.join(world, timeout_minutes=5.0)
    return file, folder, world


def train(file: Path, overrides: Sequence[str]) -> int:
    """Call pretraining as a command line does, and return its exit code."""
    sys.argv = ["pretrain.py", "--config", str(file), *overrides]
    return pretrain.main()


def leave(code: int) -> None:
    """End this process, past what gloo's threads would do to an interpreter that takes itself down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
