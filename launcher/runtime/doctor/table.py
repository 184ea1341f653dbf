"""List the doctor's checks, and those made at every start of a run."""

from plumbline.launcher.runtime.doctor import (
    clocks,
    collectives,
    compiler,
    disk,
    files,
    gpus,
    group,
    pairs,
    shared_files,
    slurm,
    versions,
)
from plumbline.launcher.runtime.doctor.check import Check

AT_START = (
    Check("versions", versions.measure, versions.judge),
    Check("disk", disk.measure, disk.judge),
    Check("files", files.measure, files.judge),
)
"""Checks of a few milliseconds, on each rank separately."""
PAIRS = Check("pairs", pairs.measure, pairs.judge, needs_group=True)
CHECKS = (
    *AT_START,
    Check("compiler", compiler.measure, compiler.judge),
    Check("slurm", slurm.measure, slurm.judge),
    Check("clocks", clocks.measure, clocks.judge),
    Check("shared files", shared_files.measure, shared_files.judge),
    Check("gpus", gpus.measure, gpus.judge),
    Check("group", group.measure, group.judge, needs_group=True),
    Check("collectives", collectives.measure, collectives.judge, needs_group=True),
    PAIRS,
)
"""All checks in order, with those that need the network last."""
