"""Say what a check is: every rank measures facts, and a pure function judges the facts of all ranks."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from torch._C._distributed_c10d import Store  # torch.distributed has them without telling mypy

from plumbline.launcher.runtime.system.world import World

Level = Literal["bad", "warning", "ok"]
LEVELS: tuple[Level, ...] = ("bad", "warning", "ok")
"""From what keeps a run from training to what is as it should be."""
EVERYWHERE = "all"
"""Node of a finding that concerns no single one."""
Facts = dict[str, Any]
"""What one rank measured, as JSON has it."""


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
    """Say what the checkpoints of a run take on disk."""

    bytes: float
    """Of one checkpoint."""
    keep: int
    """Checkpoints that stay; while the next one is written, there is one more."""
    present: int
    """Checkpoints that are there already."""
    leftovers: int = 0
    """Bytes of saves that were killed, which a start deletes."""


@dataclass(frozen=True)
class LocalNeed:
    """Say what `checkpoint.local` takes on each node."""

    path: Path
    bytes_of_rank: float
    """What a rank writes at a time."""
    copies: int
    """How many may lie there at a time beside what is there already."""


@dataclass(frozen=True)
class Place:
    """Say where a rank stands while it measures."""

    world: World
    folder: Path
    """The run folder, which need not exist."""
    need: Need | None = None
    """None where no configuration was given."""
    local: LocalNeed | None = None
    store: Store | None = None
    """What ranks of the doctor meet at; None at the start of pretraining, whose checks are of each rank alone."""
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
        """Wait until all ranks have come here; `name` is of this one meeting."""
        if self.meeting.add(name, 1) == self.world.size:
            self.meeting.set(f"{name}/all", "")
        self.meeting.wait([f"{name}/all"], self.patience)


@dataclass(frozen=True)
class Check:
    """Name a check, what a rank measures for it, and who judges."""

    name: str
    measure: Callable[[Place], Facts]
    judge: Callable[[Sequence[Report]], list[Finding]]
    needs_group: bool = False
    """Whether it calls collectives, which wait for ranks that never come once one of them has failed."""

    def take(self, place: Place) -> Facts:
        """Return what this rank measures; what fails is a fact, too, so that all ranks go on together."""
        try:
            return self.measure(place)
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"}

    def examine(self, reports: Sequence[Report]) -> list[Finding]:
        """Judge the facts of all ranks; a rank that could not measure is named in place of a judgement."""
        failed = [report for report in reports if "failed" in report.facts]
        found = [
            Finding("bad", report.node, f"rank {report.rank}: {report.facts['failed']}", "see what this rank lacks")
            for report in failed
        ]
        if not failed:
            found = self.judge(reports)
        return [Finding(one.level, one.node, one.text, one.remedy, self.name) for one in found]


def common(values: Sequence[Hashable]) -> Any:
    """Return the value that most ranks have; of equally many, that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]


def sort(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with the bad ones first."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))
