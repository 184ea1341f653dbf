"""Announce a start at once, before imports that take seconds; nothing here imports torch."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from plumbline.launcher.runtime.system.log import TRAINING
from plumbline.launcher.runtime.system.threads import NAME, host_threads

NVIDIA = "nvidia0"
GPU_FILES = (NVIDIA, "kfd", "dxg")
"""Files in /dev that show a GPU: of NVIDIA, of AMD, or of the Windows host of WSL."""
OF_SLURM = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
"""Variables that srun sets for each task of a step; a batch script has some of them, but no SLURM_STEP_ID."""
HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs; Slurm sets the last for a task without GPUs."""


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the rank's three torch.distributed variables under a bare `srun`, or none if a launcher has set them."""
    needed = (*OF_SLURM.values(), "SLURM_STEP_ID")
    if "RANK" in environment or any(name not in environment for name in needed):
        return {}
    return {name: environment[its] for name, its in OF_SLURM.items()}


def has_gpus(devices: Path = Path("/dev"), files: Sequence[str] = GPU_FILES) -> bool:
    """Return whether this host has GPUs, judging by its device files, without importing torch.

    Args:
        devices: the folder of device files.
        files: their names.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in HIDDEN and any((devices / name).exists() for name in files)


def announce() -> None:
    """Log on rank 0 how many ranks start, with how many threads each."""
    ranks = {**os.environ, **slurm_ranks(os.environ)}
    if ranks.get("RANK", "0") == "0":
        size, threads = ranks.get("WORLD_SIZE", "1"), str(host_threads() or os.environ[NAME])
        each = "" if size == "1" else " each"
        TRAINING.info(f"starting: {_several(size, 'rank')} of {_several(threads, 'thread')}{each}")


def _several(count: str, what: str) -> str:
    return f"{count} {what}" if count == "1" else f"{count} {what}s"
