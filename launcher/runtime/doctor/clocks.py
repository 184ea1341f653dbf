"""Compare the clocks of nodes with rank 0's, by round trips over the store."""

import time
from collections.abc import Sequence

from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report

EXCHANGES = 5
FAR = 1.0
"""Seconds of difference at which to warn, since file times and logs of ranks are no longer comparable."""


def measure(place: Place) -> Facts:
    """Ask rank 0 for its time a few times; the quickest answer gives the best estimate."""
    if place.world.is_main:
        for rank in range(1, place.world.size):
            for number in range(EXCHANGES):
                place.meeting.wait([f"clock/{rank}/{number}/asked"], place.patience)
                place.meeting.set(f"clock/{rank}/{number}/told", repr(time.time()))
        return {"ahead": 0.0, "within": 0.0}
    _ask(place, 0)  # rank 0 may be busy with another rank, so the first round trip is discarded
    return estimate([_ask(place, number) for number in range(1, EXCHANGES)])


def _ask(place: Place, number: int) -> tuple[float, float, float]:
    """Return this clock's time before, rank 0's time, and this clock's time after."""
    key = f"clock/{place.world.rank}/{number}"
    before = time.time()
    place.meeting.set(f"{key}/asked", "")
    told = float(place.meeting.get(f"{key}/told"))
    return before, told, time.time()


def estimate(exchanges: Sequence[tuple[float, float, float]]) -> Facts:
    """Return by how many seconds this clock is ahead of rank 0's, and the uncertainty.

    Args:
        exchanges: this clock before a question, rank 0's answer, this clock after it.
    """
    before, told, after = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return {"ahead": (before + after) / 2 - told, "within": (after - before) / 2}


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Warn of each node whose clock is certainly more than a second off."""
    findings = []
    for report in reports:
        ahead, within = report.facts["ahead"], report.facts["within"]
        if abs(ahead) - within > FAR:
            where = "ahead of" if ahead > 0 else "behind"
            text = f"the clock of rank {report.rank} is {abs(ahead):.1f} s {where} rank 0's"
            findings.append(Finding("warning", report.node, text, "start time synchronisation there (chrony)"))
    most = max(abs(report.facts["ahead"]) for report in reports)
    return findings or [Finding("ok", EVERYWHERE, f"clocks are within {most:.3f} s of rank 0's")]
