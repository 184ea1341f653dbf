"""Know how much memory this process may still take: what its host has free, or what Slurm or a container leaves it."""

from pathlib import Path

import psutil

from plumbline.data.control_groups import CGROUPS, own_groups

OWN = Path("/proc/self/cgroup")
RECLAIMED = ("inactive_file", "active_file")
"""Pages of files, which count as taken and are given up when memory is asked for."""


def available_bytes(root: Path = CGROUPS, own: Path = OWN) -> int:
    """Return how many bytes can be taken before something has to be swapped out or killed.

    Args:
        root: where control groups are mounted.
        own: file that names those of this process.
    """
    left = map(_left, own_groups(own.read_text(encoding="utf-8"), root))
    return min([psutil.virtual_memory().available, *(size for size in left if size is not None)])


def _left(group: Path) -> int | None:
    """Return how many bytes a control group may still take; None where it has no limit."""
    if not (group / "memory.max").is_file():
        return None
    limit = (group / "memory.max").read_text(encoding="ascii").strip()
    if limit == "max":
        return None
    lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    reclaimed = sum(int(size) for name, size in map(str.split, lines) if name in RECLAIMED)
    taken = int((group / "memory.current").read_text(encoding="ascii"))
    return max(0, int(limit) - taken + reclaimed)
