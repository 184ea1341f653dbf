"""Make all checks on all ranks: each rank measures, rank 0 collects and judges, and all receive the verdict.

Facts are sent over the store, since the process group may be what is broken: if a rank hangs or dies in a check, its
facts are missing and rank 0 can name it. Collective work runs in its own thread: gloo reports time-outs, but NCCL may
block a thread forever, and rank 0 has to judge even then.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLong
from dataclasses import dataclass, field, replace

from plumbline.launcher.runtime.doctor import meeting
from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Check, Facts, Finding, Place, Report, sort

GO, SKIP, END = "go", "skip", "end"
"""Rank 0's instruction after each check: continue, skip to the next without a process group, or stop."""
CHECK, FACTS = 2.0, 2.5
"""Limits in units of the time that ranks wait for one another: on a collective check, so that gloo's own error comes
first, and on rank 0's wait for the others' facts since the check began. They wait 3 units for rank 0."""


@dataclass
class Examination:
    """Hold the findings; complete only on rank 0."""

    findings: list[Finding] = field(default_factory=list)
    reports: dict[str, list[Report]] = field(default_factory=dict)
    """Name of a check -> what each rank measured, if all could."""

    @property
    def is_bad(self) -> bool:
        """Return whether a run would fail here."""
        return any(finding.level == "bad" for finding in self.findings)


def examine(place: Place, checks: Sequence[Check]) -> Examination:
    """Make checks together with all other ranks. Ranks other than 0 only get the verdict.

    Raises:
        ValueError: rank 0 disappeared.
    """
    store, world, together = place.meeting, place.world, ThreadPoolExecutor(1)  # one thread, which has chosen its GPU
    meeting.arrive(store, world)
    if not world.is_main:
        return _follow(place, checks, together)
    found = Examination()
    missing = meeting.absent(store, [f"arrived/{rank}" for rank in range(world.size)], place.seconds)
    nodes = meeting.nodes_of(store, [rank for rank in range(world.size) if rank not in missing])
    if missing:
        found.findings += meeting.findings_of_absence(missing, nodes, place.seconds)
    state = END if missing else GO
    store.set("after/arrival", state)
    for check in checks:
        if state == END:
            break
        if state == SKIP and check.needs_group:
            text = "skipped, since ranks failed in a check before"
            found.findings.append(Finding("warning", EVERYWHERE, text, "mend what is bad, then ask again", check.name))
        else:
            began = time.monotonic()
            _measure(check, place, together)
            state = _collect(found, check, place, nodes, state, began)
        store.set(f"after/{check.name}", state)
    found.findings = sort(found.findings)
    store.set("verdict", "bad" if found.is_bad else "ok")
    # Rank 0 serves the store, so it leaves last, but does not wait for ranks that are gone
    meeting.absent(store, [f"left/{rank}" if rank else "verdict" for rank in sorted(nodes)], min(10.0, place.seconds))
    return found


def _collect(found: Examination, check: Check, place: Place, nodes: dict[int, str], state: str, began: float) -> str:
    """Wait for all ranks' facts on a check that has begun, judge them, and return how to continue."""
    store = place.meeting
    keys = [f"facts/{check.name}/{rank}" for rank in range(place.world.size)]
    limit = FACTS * place.seconds
    missing = meeting.absent(store, keys, began + limit - time.monotonic())
    for rank in missing:
        text = f"rank {rank} did not come out of this check within {limit:g} s"
        remedy = "look for the error of that rank in the log, and at this node"
        found.findings.append(Finding("bad", nodes[rank], text, remedy, check.name))
    if missing:
        return END
    reports = [Report(rank, nodes[rank], json.loads(store.get(key))) for rank, key in enumerate(keys)]
    found.findings += check.examine(reports)
    if not any("failed" in report.facts for report in reports):
        found.reports[check.name] = reports
        return state
    return SKIP if check.needs_group else state


def _follow(place: Place, checks: Sequence[Check], together: ThreadPoolExecutor) -> Examination:
    """Measure along with rank 0, and return its verdict."""
    store, state = place.meeting, GO
    try:
        state = _heard(place, "arrival")
        for check in checks:
            if state == END:
                break
            if state == GO or not check.needs_group:
                _measure(check, place, together)
            state = _heard(place, check.name)
        store.wait(["verdict"], 3 * place.patience)
        verdict = store.get("verdict").decode()
        store.set(f"left/{place.world.rank}", "")
    except RuntimeError as error:  # from the store: a time-out or a lost connection
        raise ValueError(f"rank 0, which collects what is found, went away: {str(error).splitlines()[0]}") from error
    return Examination([Finding("bad" if verdict == "bad" else "ok", EVERYWHERE, "the verdict of rank 0")])


def _heard(place: Place, name: str) -> str:
    """Return rank 0's instruction after a check."""
    place.meeting.wait([f"after/{name}"], 3 * place.patience)
    return str(place.meeting.get(f"after/{name}").decode())


def _measure(check: Check, place: Place, together: ThreadPoolExecutor) -> None:
    """Make a check on this rank, and send what it measured, or that it is still waiting."""
    if check.needs_group:
        limit = CHECK * place.seconds
        # A thread that waits on a store blocks it for all others
        own = replace(place, store=place.meeting.clone())  # type: ignore[attr-defined]
        try:
            facts: Facts = together.submit(check.take, own).result(limit)
        except TooLong:
            facts = {"failed": f"nothing came of it within {limit:g} s; NCCL_DEBUG=INFO says more where it is NCCL's"}
    else:
        facts = check.take(place)
    place.meeting.set(f"facts/{check.name}/{place.world.rank}", json.dumps(facts))
