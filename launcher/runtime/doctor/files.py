"""Check, on each rank separately, what checkpoints need from a file system: renames, fsync, umask."""

import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plumbline.data.disk import sync
from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report, common
from plumbline.launcher.runtime.doctor.disk import existing

REMEDY = "set run.root to a POSIX file system that you may write to"


@contextmanager
def probe_folder(place: Place, name: str) -> Iterator[Path]:
    """Yield a hidden folder on the file system of the run folder, which is removed afterwards."""
    folder = existing(place.folder) / f".doctor.{name}"
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(place: Place) -> Facts:
    """Rename a file over another and a folder, flush both, and look at the result."""
    facts: Facts = {"folder": str(existing(place.folder)), "problems": [], "mode": None}
    try:
        with probe_folder(place, f"{place.world.rank}.{uuid.uuid4().hex[:8]}") as folder:
            reference = folder / "reference"
            reference.touch()
            facts["mode"] = stat.S_IMODE(reference.stat().st_mode)
            facts["problems"] += problems_of(folder)
    except OSError as error:
        facts["problems"].append(f"writing, renaming and flushing files fails ({error.strerror})")
    return facts


def problems_of(folder: Path) -> Iterator[str]:
    """Yield how a file system, tried in an empty folder, violates what checkpoints need."""
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
    """Name nodes whose file system violates a requirement, and those whose umask hides files or differs."""
    findings = [
        Finding("bad", report.node, f"rank {report.rank}: {problem} in {report.facts['folder']}", REMEDY)
        for report in reports
        for problem in report.facts["problems"]
    ]
    written = [report for report in reports if report.facts["mode"] is not None]
    usual = common([report.facts["mode"] for report in written]) if written else 0
    for report in written:
        mode = report.facts["mode"]
        if mode & 0o600 != 0o600:
            text = f"rank {report.rank}: new files have mode {mode:03o}: their owner cannot read or write them"
            findings.append(Finding("bad", report.node, text, "umask 022"))
        elif mode != usual:
            text = f"rank {report.rank}: new files have mode {mode:03o}, {usual:03o} on most ranks"
            findings.append(Finding("warning", report.node, text, "give all nodes the same umask"))
    text = f"renames and fsync work in {reports[0].facts['folder']}, new files have mode {usual:03o}"
    return findings or [Finding("ok", EVERYWHERE, text)]
