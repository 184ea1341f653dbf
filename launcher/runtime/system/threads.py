"""Choose how many threads a rank computes with on its host and how they wait, and leave a choice to who has made it."""

import os
from collections.abc import Mapping
from pathlib import Path

import psutil

NAME = "OMP_NUM_THREADS"
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user says how threads wait for each other."""
CGROUPS = Path("/sys/fs/cgroup")
OF_LAUNCHERS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
"""Variables by which torchrun and DeepSpeed say how many ranks a host has."""


def sleep_while_waiting() -> None:
    """Let threads sleep while they wait for each other, unless the user has said how; ahead of the import of torch.

    OpenMP reads it when it is loaded. By default a thread that has done its part keeps its core busy until all have,
    and where something else wants that core, it keeps the one from running that it waits for.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def host_threads() -> int | None:
    """Return how many threads this rank takes for work on its host's processors; None: the user has said it.

    A GPU rank computes there as well: the update of offloaded optimizer states.
    """
    if _is_chosen(os.environ):
        return None
    cores = min(len(os.sched_getaffinity(0)), _quota(Path("/proc/self/cgroup").read_text(encoding="utf-8")))
    own = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if own.isdigit() and not any(name in os.environ for name in OF_LAUNCHERS):  # no other rank is in this task of srun
        return max(1, min(int(cores), int(own)))
    return max(1, int(cores) // ranks_on_this_host(os.environ))


def _quota(groups: str, root: Path = CGROUPS) -> float:
    """Return how many cores' time this process may use: a container of few cores still sees all those of its host.

    Args:
        groups: text of /proc/self/cgroup; only version 2 of control groups is looked at.
        root: where they are mounted.
    """
    own = next((line[len("0::/") :] for line in groups.splitlines() if line.startswith("0::/")), "")
    limits = [float("inf")]
    for folder in (root / own, *(root / own).parents):
        if folder.is_relative_to(root) and (folder / "cpu.max").is_file():
            time, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            limits.append(float("inf") if time == "max" else int(time) / int(period))
    return min(limits)


def _is_chosen(environment: Mapping[str, str]) -> bool:
    """Return whether the user has set the number of threads, and not torchrun, which sets 1 where nobody has."""
    if environment.get(NAME) != "1" or "TORCHELASTIC_RUN_ID" not in environment:
        return NAME in environment
    try:
        return NAME in psutil.Process(os.getppid()).environ()  # what torchrun was started with, not what it set since
    except psutil.Error:  # it is not ours to look at, or gone
        return True


def ranks_on_this_host(environment: Mapping[str, str]) -> int:
    """Return how many ranks this host has, as torchrun, DeepSpeed or Slurm tells it; 1 where none does."""
    names = (*OF_LAUNCHERS, "SLURM_NTASKS_PER_NODE")
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), 1)
