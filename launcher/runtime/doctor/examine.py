"""Make all checks on all ranks: each measures, rank 0 collects and judges, and all hear the verdict.

Facts go over the store and not over the process group, which may be what is broken: a rank that hangs or dies in a
check is then one whose facts do not come, and rank 0 can name it. What ranks do together runs in a thread of its own:
gloo says that it waits too long, but NCCL may keep a thread for ever, and rank 0 has to judge even then.
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
"""What rank 0 says after each check: to the next, to the next that needs no process group, or no further."""
CHECK, FACTS = 2.0, 2.5
"""How much longer than ranks wait for one another a check of theirs may take, for gloo's own error comes first; and how
long after its beginning rank 0 waits for what the others measured. They wait 3 times as long for rank 0."""


@dataclass
class Examination:
    """Hold what was found, on rank 0 all of it."""

    findings: list[Finding] = field(default_factory=list)
    reports: dict[str, list[Report]] = field(default_factory=dict)
    """Name of a check -> what each rank measured, where all could."""

    @property
    def is_bad(self) -> bool:
        """Return whether a run would fail here."""
        return any(finding.level == "bad" for finding in self.findings)


def examine(place: Place, checks: Sequence[Check]) -> Examination:
    """Make checks together with all other ranks. On ranks other than 0, only the verdict is filled in.

    Raises:
        ValueError: rank 0 went away.
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
    # Rank 0 serves the store: it leaves last, but waits for nobody who has long gone
    meeting.absent(store, [f"left/{rank}" if rank else "verdict" for rank in sorted(nodes)], min(10.0, place.seconds))
    return found


def _collect(found: Examination, check: Check, place: Place, nodes: dict[int, str], state: str, began: float) -> str:
    """Wait for the facts of all ranks on a check that has begun, judge, and return how to go on."""
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
    """Measure when rank 0 does, and take over its verdict."""
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
    except RuntimeError as error:  # of the store: of time, or of a connection that is gone
        raise ValueError(f"rank 0, which collects what is found, went away: {str(error).splitlines()[0]}") from error
    return Examination([Finding("bad" if verdict == "bad" else "ok", EVERYWHERE, "the verdict of rank 0")])


def _heard(place: Place, name: str) -> str:
    """Return what rank 0 says after a check."""
    place.meeting.wait([f"after/{name}"], 3 * place.patience)
    return str(place.meeting.get(f"after/{name}").decode())


def _measure(check: Check, place: Place, together: ThreadPoolExecutor) -> None:
    """Take a check on this rank, and tell what it has measured, or that it still waits."""
    if check.needs_group:
        limit = CHECK * place.seconds
        # Who waits at a store keeps all other threads from it
        own = replace(place, store=place.meeting.clone())  # type: ignore[attr-defined]
        try:
            facts: Facts = together.submit(check.take, own).result(limit)
        except TooLong:
            facts = {"failed": f"nothing came of it within {limit:g} s; NCCL_DEBUG=INFO says more where it is NCCL's"}
    else:
        facts = check.take(place)
    place.meeting.set(f"facts/{check.name}/{place.world.rank}", json.dumps(facts))
