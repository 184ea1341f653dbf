"""Check what checkpoints ask of a file system, on each rank by itself: renames, fsync, umask."""

import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plumbline.data.workspace import sync
from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report, common
from plumbline.launcher.runtime.doctor.disk import existing


@contextmanager
def probe_folder(place: Place, name: str) -> Iterator[Path]:
    """Yield a hidden folder on the file system of the run folder, which is removed with all that is in it."""
    folder = existing(place.folder) / f".doctor.{name}"
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(place: Place) -> Facts:
    """Rename a file over another and a folder, flush both, and look at the result."""
    with probe_folder(place, f"{place.world.rank}.{uuid.uuid4().hex[:8]}") as folder:
        problems = list(problems_of(folder))
        reference = folder / "reference"
        reference.touch()
        mode = stat.S_IMODE(reference.stat().st_mode)
    return {"folder": str(folder.parent), "problems": problems, "mode": mode}


def problems_of(folder: Path) -> Iterator[str]:
    """Yield what an empty folder's file system does otherwise than checkpoints need."""
    old, new, inside = folder / "old", folder / "new", folder / "staging"
    old.write_text("old")
    new.write_text("new")
    sync(new)
    with old.open(encoding="utf-8") as reader:
        new.replace(old)
        if old.read_text() != "new" or new.exists():
            yield "a file that was renamed over another does not replace it"
        if reader.read() != "old":
            yield "a file that is open does not survive its replacement"
    inside.mkdir()
    (inside / "file").write_text("content")
    sync(inside / "file")
    inside.rename(folder / "final")
    sync(folder)
    if inside.exists() or (folder / "final" / "file").read_text() != "content":
        yield "a renamed folder is not where it was renamed to"


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Name nodes whose file system breaks a promise, and those whose umask hides files or differs."""
    findings = [
        Finding("bad", report.node, f"rank {report.rank}: {problem} in {report.facts['folder']}", "set run.root to a "
                "POSIX file system")
        for report in reports
        for problem in report.facts["problems"]
    ]  # fmt: skip
    usual = common([report.facts["mode"] for report in reports])
    for report in reports:
        mode = report.facts["mode"]
        if mode & 0o600 != 0o600:
            text = f"rank {report.rank}: new files have mode {mode:03o}: their owner cannot read or write them"
            findings.append(Finding("bad", report.node, text, "umask 022"))
        elif mode != usual:
            text = f"rank {report.rank}: new files have mode {mode:03o}, {usual:03o} on most ranks"
            findings.append(Finding("warning", report.node, text, "give all nodes the same umask"))
    text = f"renames and fsync work in {reports[0].facts['folder']}, new files have mode {usual:03o}"
    return findings or [Finding("ok", EVERYWHERE, text)]
