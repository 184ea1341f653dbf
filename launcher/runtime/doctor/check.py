"""Define a check: every rank measures facts, and a pure function judges the facts of all ranks."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from torch._C._distributed_c10d import Store  # torch.distributed has them without telling mypy

from plumbline.launcher.runtime.ranks.world import World

Level = Literal["bad", "warning", "ok"]
LEVELS: tuple[Level, ...] = ("bad", "warning", "ok")
"""From problems that prevent training to no problem."""
EVERYWHERE = "all"
"""Node of a finding that concerns no single node."""
Facts = dict[str, Any]
"""What one rank measured, as JSON values."""


@dataclass(frozen=True)
class Finding:
    """Hold one sentence about one node, and what to do about it."""

    level: Level
    node: str
    text: str
    remedy: str = ""
    check: str = ""
    """Name of the check, which `Check.examine` fills in."""


@dataclass(frozen=True)
class Report:
    """Hold what one rank measured."""

    rank: int
    node: str
    facts: Facts

    @property
    def name(self) -> str:
        """Return the rank and its node, for people."""
        return f"rank {self.rank} ({self.node})"


@dataclass(frozen=True)
class Need:
    """State how much disk space the checkpoints of a run need."""

    bytes: float
    """Bytes of one checkpoint."""
    keep: int
    """Checkpoints that are kept, plus one more while the next one is written."""
    present: int
    """Checkpoints that already exist."""
    leftovers: int = 0
    """Bytes of saves that were killed, which a start deletes."""


@dataclass(frozen=True)
class LocalNeed:
    """State how much space `checkpoint.local` needs on each node."""

    path: Path
    bytes_of_rank: float
    """Bytes that a rank writes at a time."""
    copies: int
    """How many new copies may exist at a time."""


@dataclass(frozen=True)
class Place:
    """Hold the context in which a rank measures."""

    world: World
    folder: Path
    """The run folder, which need not exist."""
    need: Need | None = None
    """None if no configuration was given."""
    local: LocalNeed | None = None
    store: Store | None = None
    """Store at which the doctor's ranks meet, or None at the start of pretraining, whose checks are per rank."""
    seconds: float = 120.0
    """How long ranks wait for one another."""

    @property
    def meeting(self) -> Store:
        """Return the store, for checks of several ranks."""
        assert self.store is not None, "a check of several ranks needs the store"
        return self.store

    @property
    def patience(self) -> timedelta:
        """Return how long ranks wait for one another."""
        return timedelta(seconds=self.seconds)

    def meet(self, name: str) -> None:
        """Wait until all ranks have arrived; `name` identifies this meeting."""
        if self.meeting.add(name, 1) == self.world.size:
            self.meeting.set(f"{name}/all", "")
        self.meeting.wait([f"{name}/all"], self.patience)


@dataclass(frozen=True)
class Check:
    """Hold a check: its name, what a rank measures for it, and how that is judged."""

    name: str
    measure: Callable[[Place], Facts]
    judge: Callable[[Sequence[Report]], list[Finding]]
    needs_group: bool = False
    """Whether it calls collectives, which would wait forever once a rank has failed."""

    def take(self, place: Place) -> Facts:
        """Return what this rank measures; a failure is a fact, too, so that all ranks continue together."""
        try:
            return self.measure(place)
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"}

    def examine(self, reports: Sequence[Report]) -> list[Finding]:
        """Judge the facts of all ranks, or name the ranks that could not measure."""
        failed = [report for report in reports if "failed" in report.facts]
        found = [
            Finding("bad", report.node, f"rank {report.rank}: {report.facts['failed']}", "see what this rank lacks")
            for report in failed
        ]
        if not failed:
            found = self.judge(reports)
        return [Finding(one.level, one.node, one.text, one.remedy, self.name) for one in found]


def common(values: Sequence[Hashable]) -> Any:
    """Return the value that most ranks have, with ties broken by the lowest rank."""
    return Counter(values).most_common(1)[0][0]


def sort(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with the bad ones first."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))
