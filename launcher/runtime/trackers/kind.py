"""Declare what a tracker is: a place outside of metrics.jsonl where people look at the numbers of many runs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True)
class TrackedRun:
    """Say what a tracker learns of a run before its first number."""

    folder: Path
    project: str
    """What its runs are listed under."""
    config: Mapping[str, Any]
    """The configuration by section and key."""
    settings: Mapping[str, Any]
    """The same values by their paths, section.key."""


class Tracker(ABC):
    """Take the numbers of one attempt of a run. Whatever cannot be sent is an exception, of any kind.

    Args:
        run: what it is about.
        run_id: that `self.run_id` was at the attempt before; None: the run is new here.
        step: what the tracker has of this step and later ones is void, if it can forget at all (`rewinds`).
    """

    package: ClassVar[str | None] = None
    """The package that it needs, which an extra of the same name installs; None: none."""
    rewinds: ClassVar[bool] = False
    """Whether the steps that a resumed run makes again take the place of those before. Else they are not sent again."""

    run_id: str
    """What the tracker knows the run by, in every attempt."""
    where: str | None
    """Where people find it, for the log; None: in the run folder, as everything else."""

    @abstractmethod
    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None: ...

    @classmethod  # noqa: B027 - most kinds need nothing
    def check(cls) -> None:
        """Refuse to start where only the user can help.

        Raises:
            ValueError: says what is missing and how to give it.
        """

    @abstractmethod
    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each of some curves."""

    @abstractmethod
    def close(self) -> None:
        """Send what is left, and say that this attempt is over."""
