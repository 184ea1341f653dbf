"""Describe what a result may depend on: versions, code, hardware, the command."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from plumbline.launcher.runtime.cluster.launch import job_id
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.installation import ROOT, is_checkout


def environment(world: World) -> dict[str, Any]:
    """Return the facts of environment.json."""
    packages = ("torch", "deepspeed", "transformers", "tokenizers", "numpy")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": [word for word in sys.argv if not word.startswith("--local_rank=")],  # of the DeepSpeed launcher
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "world_size": world.size,
        "slurm_job_id": job_id(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    if not is_checkout():  # otherwise git would find a repository of the user's around the environment
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
