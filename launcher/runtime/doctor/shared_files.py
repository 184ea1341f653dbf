"""Check that ranks see each other's files and locks in the run folder, and how soon."""

import errno
import fcntl
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from plumbline.data.disk import sync
from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report
from plumbline.launcher.runtime.doctor.files import probe_folder

LATE = 10.0
"""Seconds of delay in seeing a file at which to warn; NFS caches names for up to 60."""
LOCKS: dict[str, Callable[[int, int], None]] = {"fcntl": fcntl.lockf, "flock": fcntl.flock}
"""Kinds of locks: the run's lock is of the first, those of corpora and compiled operators of the second."""


def measure(place: Place) -> Facts:
    """Write a file on each rank, look for those of others, and try locks that rank 0 holds."""
    if place.world.is_main:
        place.meeting.set("shared/name", uuid.uuid4().hex[:8])
    with probe_folder(place, place.meeting.get("shared/name").decode()) as folder:
        place.meet("shared/begin")
        names = {rank: folder / f"rank-{rank}" for rank in range(place.world.size)}
        expected = list(names) if place.world.is_main else [0]
        for rank in expected:  # NFS caches names longest that were looked up and not found
            names[rank].exists()
        place.meet("shared/looked")
        mine = names[place.world.rank]
        staging = mine.with_suffix(".staging")
        staging.write_text(str(place.world.rank))
        sync(staging)
        staging.rename(mine)
        place.meet("shared/written")
        began = time.monotonic()
        missing = _wait_for({rank: names[rank] for rank in expected}, began + place.seconds / 2)
        seconds = time.monotonic() - began
        place.meet("shared/seen")
        locks = {kind: _lock(place, folder / kind, kind) for kind in LOCKS}
        place.meet("shared/end")  # else the first rank to leave would remove what others look at
    return {"folder": str(folder.parent), "missing": missing, "seconds": seconds, "locks": locks}


def _wait_for(files: dict[int, Path], deadline: float) -> list[int]:
    """Return the ranks whose file is not there with its content by the deadline."""
    waiting = dict(files)
    while True:
        for rank, file in list(waiting.items()):
            try:
                seen = file.read_text() == str(rank)
            except OSError:
                seen = False
            if seen:
                del waiting[rank]
        if not waiting or time.monotonic() > deadline:
            return sorted(waiting)
        time.sleep(0.05)


def _lock(place: Place, file: Path, kind: str) -> str:
    """Return a lock's outcome: `held` by rank 0, `refused` to others as it should be, `taken` twice, or an error."""
    found = ""
    with file.open("a") as opened:
        for turn in (True, False):  # rank 0 first
            if place.world.is_main == turn:
                found = _try(opened.fileno(), kind)
            place.meet(f"shared/lock/{kind}/{turn}")
    return "held" if place.world.is_main and found == "taken" else found


def _try(descriptor: int, kind: str) -> str:
    try:
        LOCKS[kind](descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return "refused" if error.errno in (errno.EACCES, errno.EAGAIN) else str(error)
    return "taken"


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Name nodes that do not see the files or locks of others."""
    names = {report.rank: report.name for report in reports}
    folder, findings = reports[0].facts["folder"], []
    for report in reports:
        facts = report.facts
        for rank in facts["missing"]:
            text = f"rank {report.rank} does not see a file that {names[rank]} has written in {facts['folder']}"
            remedy = "set run.root to a folder that all nodes share, by the same path"
            findings.append(Finding("bad", report.node, text, remedy))
        if not facts["missing"] and facts["seconds"] > LATE:
            text = f"rank {report.rank} sees files of other ranks {facts['seconds']:.0f} s late in {folder}"
            findings.append(Finding("warning", report.node, text, "mount it with shorter caching (NFS: actimeo=1)"))
        for kind, state in facts["locks"].items():
            if state not in ("held", "refused") and not facts["missing"]:
                what = "got a lock that rank 0 holds" if state == "taken" else f"cannot lock ({state})"
                text = f"rank {report.rank} {what} ({kind}) in {folder}: two launches could train one run"
                remedy = "mount it with locks (NFS: without nolock; Lustre: with flock)"
                findings.append(Finding("warning", report.node, text, remedy))
    if findings:
        return findings
    if len(reports) == 1:
        return [Finding("ok", EVERYWHERE, f"locks work in {folder}; one rank has nobody to share files with")]
    slowest = max(report.facts["seconds"] for report in reports)
    text = f"all ranks see each other's files and locks in {folder}, after {slowest:.1f} s at most"
    return [Finding("ok", EVERYWHERE, text)]
