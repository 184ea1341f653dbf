"""Choose how many threads a rank computes with on its host, and leave the choice to whoever has made it."""

import os
from collections.abc import Mapping

import psutil

NAME = "OMP_NUM_THREADS"


def host_threads() -> int | None:
    """Return how many threads this rank takes for work on its host's processors; None: the user has said it.

    A GPU rank computes there as well: the update of offloaded optimizer states.
    """
    if _is_chosen(os.environ):
        return None
    return max(1, len(os.sched_getaffinity(0)) // _ranks_on_this_host(os.environ))


def _is_chosen(environment: Mapping[str, str]) -> bool:
    """Return whether the user has set the number of threads, and not torchrun, which sets 1 where nobody has."""
    if environment.get(NAME) != "1" or "TORCHELASTIC_RUN_ID" not in environment:
        return NAME in environment
    try:
        return NAME in psutil.Process(os.getppid()).environ()  # what torchrun was started with, not what it set since
    except psutil.Error:  # it is not ours to look at, or gone
        return True


def _ranks_on_this_host(environment: Mapping[str, str]) -> int:
    """Return how many ranks this host has, as torchrun, DeepSpeed or Slurm tells it; 1 where none does."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), 1)
