"""Compare the free space and inodes at the run folder, and the space on the nodes, with the needs of checkpoints.

And see that nothing lies where their folder, or one above it, will be.

Free space is what statvfs reports, which ignores user and group quotas, and knows folder quotas only on some file
systems.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from plumbline.data.workspace import in_the_way_of
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, LocalNeed, Place, Report

FILES_BESIDES_SHARDS = 100
"""Generous bound on the files of a checkpoint and of a run besides the one or two per rank."""


def measure(place: Place) -> Facts:
    """Return free bytes and inodes, and how many checkpoints need; None where unknown."""
    wanted = place.folder / CHECKPOINTS  # which may be a link to a larger disk
    folder = existing(wanted)
    blocked = in_the_way_of(wanted)
    found = os.statvfs(folder)
    need = place.need
    local = {} if place.local is None else _measure_local(place.local)
    return {
        **local,
        "folder": str(folder),
        "in_the_way": None if blocked is None else str(blocked),
        "free_bytes": found.f_bavail * found.f_frsize + (0 if need is None else need.leftovers),
        "free_files": found.f_favail if found.f_files > 0 else None,  # some file systems do not count them
        "checkpoint_bytes": None if need is None else need.bytes,
        "more_checkpoints": None if need is None else max(1, need.keep + 1 - need.present),
        "checkpoint_files": 3 * place.world.size + FILES_BESIDES_SHARDS,
    }


def _measure_local(need: LocalNeed) -> Facts:
    folder = existing(need.path)
    return {
        "local_folder": str(folder),
        "local_free_bytes": shutil.disk_usage(folder).free,
        "local_bytes": need.bytes_of_rank * need.copies,
    }


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    # os.path.isdir: below a folder that cannot be searched, Path.is_dir raises
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(path))  # noqa: PTH112


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Report as bad if one checkpoint does not fit or has no folder, and warn if not all kept ones fit.

    Nodes that share the folder all see the same, so the one with the least space is reported. It is named if others see
    a different folder.
    """
    least = min(reports, key=lambda report: report.facts["free_bytes"])
    facts, findings = least.facts, []
    shared = len({report.facts["folder"] for report in reports}) == 1
    node = EVERYWHERE if shared else least.node
    free, need = facts["free_bytes"], facts["checkpoint_bytes"]
    where = f"{gigabytes(free)} free at {facts['folder']}"
    remedy = "free some space, or set run.root to a larger file system"
    if need is not None and free < need:
        findings.append(Finding("bad", node, f"{where}, one checkpoint takes {gigabytes(need)}", remedy))
    elif need is not None and free < need * facts["more_checkpoints"]:
        text = f"{where}, {facts['more_checkpoints']} more checkpoints of {gigabytes(need)} may lie there at a time"
        findings.append(Finding("warning", node, text, f"{remedy}, or lower checkpoint.keep_last"))
    counted = [report for report in reports if report.facts["free_files"] is not None]
    fewest = min(counted, key=lambda report: report.facts["free_files"], default=None)
    if fewest is not None and fewest.facts["free_files"] < fewest.facts["checkpoint_files"]:
        text = (
            f"{fewest.facts['free_files']} inodes free at {fewest.facts['folder']}, a checkpoint may take "
            f"{fewest.facts['checkpoint_files']}"
        )
        remedy = "delete files there, or set run.root to another file system"
        findings.append(Finding("bad", EVERYWHERE if shared else fewest.node, text, remedy))
    blocked = next((report for report in reports if report.facts["in_the_way"]), None)
    if blocked is not None:
        text = f"{blocked.facts['in_the_way']} is a file, or a link that leads to no folder"
        remedy = "move it away, or set another run.name or run.root; a folder of this name is written"
        findings.append(Finding("bad", EVERYWHERE if shared else blocked.node, text, remedy))
    findings += _judge_local(reports)
    takes = "" if need is None else f", one checkpoint takes {gigabytes(need)}"
    return findings or [Finding("ok", EVERYWHERE, f"{where}{takes}; quotas are not seen")]


def _judge_local(reports: Sequence[Report]) -> Iterator[Finding]:
    """Warn of nodes without room for local copies, which are then not made."""
    of_node: dict[str, list[Facts]] = {}
    for report in reports:
        if "local_bytes" in report.facts:
            of_node.setdefault(report.node, []).append(report.facts)
    for node, facts in of_node.items():
        free, need = facts[0]["local_free_bytes"], sum(rank["local_bytes"] for rank in facts)
        if free < need:
            text = (
                f"{gigabytes(free)} free at {facts[0]['local_folder']}, local checkpoints of the node's {len(facts)} "
                f"rank(s) take {gigabytes(need)}"
            )
            yield Finding("warning", node, text, "free some space there, or set another checkpoint.local.path")


def gigabytes(count: float) -> str:
    """Format bytes as GB, or as MB if that would round to nothing."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
