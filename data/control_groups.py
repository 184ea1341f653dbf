"""Find the control groups by which Slurm or a container limits this process; only version 2 of them is read."""

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""


def own_groups(groups: str, root: Path) -> list[Path]:
    """Return the folders of a process's own group and of those around it, from the innermost outwards.

    Args:
        groups: text of /proc/PID/cgroup.
        root: where control groups are mounted.
    """
    own = next((line[len("0::/") :] for line in groups.splitlines() if line.startswith("0::/")), "")
    return [folder for folder in (root / own, *(root / own).parents) if folder.is_relative_to(root)]
