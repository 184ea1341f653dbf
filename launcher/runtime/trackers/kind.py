"""Define the interface of a tracker: a service besides metrics.jsonl that shows the numbers of many runs."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

USER = re.compile(r"(?<=://)[^:/@\s]*(:\S*)?@")
QUERY = re.compile(r"(://[^?\s]*)\?[^\s'\")]*")


def without_secrets(text: str) -> str:
    """Return a text in which all addresses are without user, password and query, so that it can be logged."""
    return QUERY.sub(r"\1", USER.sub("", text))


@dataclass(frozen=True)
class TrackedRun:
    """Hold the description of a run that a tracker gets before the first number."""

    folder: Path
    project: str
    """Name under which its runs are listed."""
    config: Mapping[str, Any]
    """The configuration by section and key."""
    settings: Mapping[str, Any]
    """The same values by their paths, section.key."""


class Tracker(ABC):
    """Receive the numbers of one attempt of a run. If they cannot be sent, methods raise an exception of any type.

    Args:
        run: description of the run.
        run_id: `self.run_id` of the previous attempt, or None if the run is new here.
        step: the tracker discards its data of this and later steps, if it can (`rewinds`).
    """

    package: ClassVar[str | None] = None
    """The package that it needs, installed by an extra of the same name, or None."""
    rewinds: ClassVar[bool] = False
    """Whether steps that a resumed run repeats replace those sent before. If not, they are not sent again."""

    run_id: str
    """The tracker's id of the run, the same in every attempt."""
    where: str | None
    """Where to find the run, for the log, or None if it is in the run folder."""

    @abstractmethod
    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None: ...

    @classmethod  # noqa: B027 - most kinds need nothing
    def check(cls) -> None:
        """Refuse to start if the tracker needs something that only the user can provide.

        Raises:
            ValueError: says what is missing and how to provide it.
        """

    @abstractmethod
    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each of some curves."""

    @abstractmethod
    def close(self) -> None:
        """Send what is left, and end this attempt."""
