"""Choose a rank's number of threads on its host and how they wait, unless the user has chosen."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import psutil

from plumbline.data.control_groups import CGROUPS, own_groups

NAME = "OMP_NUM_THREADS"
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user chooses how threads wait for each other."""
OF_LAUNCHERS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
"""Variables in which torchrun and DeepSpeed set the number of ranks per host."""


def sleep_while_waiting() -> None:
    """Make threads sleep while they wait for each other, unless the user has chosen; call it before importing torch.

    OpenMP reads the setting when it is loaded. By default a thread that has finished spins on its core until all have,
    and on a busy host it may thereby block the very thread that it waits for.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def host_threads() -> int | None:
    """Return the number of threads for this rank's work on its host's processors, or None if the user has set it.

    A GPU rank computes there too: the update of offloaded optimizer states.
    """
    if _is_chosen(os.environ):
        return None
    cores = min(len(os.sched_getaffinity(0)), _quota(Path("/proc/self/cgroup").read_text(encoding="utf-8")))
    own = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if own.isdigit() and not any(name in os.environ for name in OF_LAUNCHERS):  # one rank per srun task
        return max(1, min(int(cores), int(own)))
    return max(1, int(cores) // ranks_on_this_host(os.environ))


def _quota(groups: str, root: Path = CGROUPS) -> float:
    """Return the number of cores whose time this process may use: a container sees all cores of its host.

    Args:
        groups: text of /proc/self/cgroup; only version 2 of control groups is read.
        root: where control groups are mounted.
    """
    limits = [float("inf")]
    for folder in own_groups(groups, root):
        if (folder / "cpu.max").is_file():
            time, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            limits.append(float("inf") if time == "max" else int(time) / int(period))
    return min(limits)


def _is_chosen(environment: Mapping[str, str]) -> bool:
    """Return whether the user has set the number of threads, rather than torchrun, which defaults it to 1."""
    if environment.get(NAME) != "1" or "TORCHELASTIC_RUN_ID" not in environment:
        return NAME in environment
    try:
        return NAME in psutil.Process(os.getppid()).environ()  # torchrun's initial environment
    except psutil.Error:  # it has ended, or we may not read it
        return True


def ranks_on_this_host(environment: Mapping[str, str]) -> int:
    """Return the number of ranks on this host from torchrun, DeepSpeed or Slurm, or 1 without them.

    Slurm counts the tasks of a step on its nodes as in 4(x2),3: the first of them stands for all.
    """
    names = (*OF_LAUNCHERS, "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    found = (re.match(r"\d+", environment.get(name, "")) for name in names)
    return next((int(count[0]) for count in found if count), 1)
