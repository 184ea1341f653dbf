"""Account for the wall-clock time of a run: one clock that charges every moment to one bucket, over all attempts.

An attempt is one start of the run, from the launch of its rank 0 to its end. Its time begins where that of the previous
attempt ended, so that the attempts of a run add up to the time since it was first started, except for the time between
the completion of a run and its extension.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from typing import Any, Literal, get_args

from plumbline.launcher.runtime.system.exit_codes import UNUSABLE

Bucket = Literal["queue", "start_up", "compile", "steps", "data_wait", "checkpoint", "evaluation", "lost", "shutdown"]
BUCKETS: tuple[str, ...] = get_args(Bucket)


class Ledger:
    """Charge the time of this process to one bucket at a time, first to `start_up`; other threads may read it.

    Args:
        age: seconds of start-up that have already passed.
        queue: seconds before the attempt.
        clock: returns the time in seconds.
    """

    def __init__(self, age: float = 0.0, queue: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.bucket: Bucket = "start_up"
        self._clock, self._lock = clock, threading.Lock()
        self._since = clock() - age
        self._seconds: dict[str, float] = {**dict.fromkeys(BUCKETS, 0.0), "queue": queue}

    def enter(self, bucket: Bucket) -> None:
        """Charge the time until now to the current bucket, and the time from now on to `bucket`."""
        with self._lock:
            now = self._clock()
            self._seconds[self.bucket] += now - self._since
            self.bucket, self._since = bucket, now

    def lose(self, seconds: float) -> None:
        """Move time spent on steps that must be repeated to `lost`."""
        with self._lock:
            self._seconds = moved(self._seconds, seconds, "lost", "steps")

    def spent(self, bucket: Bucket) -> float:
        """Return the seconds of one bucket until now."""
        with self._lock:
            running = self._clock() - self._since if bucket == self.bucket else 0.0
            return self._seconds[bucket] + running

    def read(self) -> dict[str, float]:
        """Return the seconds of each bucket until now."""
        with self._lock:
            running = self._clock() - self._since
            return {**self._seconds, self.bucket: self._seconds[self.bucket] + running}


@dataclass(frozen=True)
class Attempt:
    """Describe an attempt so far: when and where it ran, how far it came, how it ended, and where its time went.

    The seconds of its buckets add up to the time from `queued` to `end`.
    """

    queued: float
    """When its time begins: the end of the previous attempt. For the first attempt, and one that extends a complete
    run, when its Slurm job was submitted."""
    start: float
    """When its Slurm job got its nodes, or without Slurm, when its rank 0 was launched."""
    end: float
    """Time up to which it is accounted for."""
    host: str
    pid: int
    slurm_job_id: str | None
    slurm_restart_count: int | None
    ranks: int
    first_step: int | None
    """The step from which it resumed, or None before training begins."""
    last_step: int | None
    exit_code: int | None
    """None while it runs, and if it was killed."""
    why: str | None
    """How it ended, in words."""
    seconds: dict[str, float]
    progress: tuple[tuple[int, float], ...]
    """Steps with the seconds in bucket `steps` until then: the one from which it resumed, those at which it saved, and
    the last, without lost steps."""

    @property
    def was_refused(self) -> bool:
        """Return whether it was refused before training began, because the request could not be carried out."""
        return self.exit_code == UNUSABLE and self.first_step is None

    def is_of(self, other: "Attempt") -> bool:
        """Return whether both records are of the same attempt."""
        return (self.host, self.pid, self.start) == (other.host, other.pid, other.start)

    def extended(self, until: float, bucket: Bucket) -> "Attempt":
        """Return the attempt with the time since its end charged to a bucket."""
        passed = max(0.0, until - self.end)
        return replace(self, end=self.end + passed, seconds=moved(self.seconds, passed, bucket))

    def without_steps_after(self, step: int) -> "Attempt":
        """Return the attempt with its time on steps after `step`, which will be repeated, moved to `lost`."""
        if not self.progress or step > self.progress[-1][0]:
            return self
        kept = seconds_until(self.progress, step)
        earlier = tuple(point for point in self.progress if point[0] < step)
        spent = moved(self.seconds, self.seconds["steps"] - kept, "lost", "steps")
        return replace(self, seconds=spent, progress=(*earlier, (max(step, self.progress[0][0]), kept)))

    def to_json(self) -> dict[str, Any]:
        """Return the object of attempts.jsonl."""
        seconds = {name: round(value, 3) for name, value in self.seconds.items()}
        progress = [[step, round(value, 3)] for step, value in self.progress]
        return {
            **asdict(self),
            **{name: as_text(getattr(self, name)) for name in TIMES},
            "seconds": seconds,
            "progress": progress,
        }

    @classmethod
    def from_json(cls, item: dict[str, Any]) -> "Attempt":
        """Return the attempt from an object of attempts.jsonl.

        Raises:
            ValueError: a key is missing or has an invalid value.
        """
        try:
            values = {field.name: item[field.name] for field in fields(cls)}
            values |= {name: as_time(values[name]) for name in TIMES}
            values["seconds"] = {name: float(item["seconds"][name]) for name in BUCKETS}
            values["progress"] = tuple((int(step), float(spent)) for step, spent in item["progress"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"no attempt of a run: {type(error).__name__} {error}") from error
        return cls(**values)


TIMES = ("queued", "start", "end")


def seconds_until(progress: Sequence[tuple[int, float]], step: int) -> float:
    """Return the seconds that an attempt spent on steps up to `step`, interpolated between known points."""
    before = progress[0]
    for point in progress:
        if point[0] >= step:
            share = 1.0 if point[0] == before[0] else (step - before[0]) / (point[0] - before[0])
            return before[1] + max(0.0, share) * (point[1] - before[1])
        before = point
    return before[1]


def moved(seconds: dict[str, float], amount: float, to: Bucket, origin: Bucket | None = None) -> dict[str, float]:
    """Return the seconds of buckets with `amount` added to one, and subtracted from `origin` if given."""
    changed = {**seconds, to: seconds[to] + amount}
    return changed if origin is None else {**changed, origin: seconds[origin] - amount}


def total(attempts: Iterable[Attempt]) -> dict[str, float]:
    """Return the seconds of each bucket over some attempts."""
    taken = [attempt.seconds for attempt in attempts]
    return {bucket: sum(seconds[bucket] for seconds in taken) for bucket in BUCKETS}


def goodput(seconds: dict[str, float]) -> float | None:
    """Return the share of time spent on steps that were kept, or None if no time has passed."""
    whole = sum(seconds.values())
    return seconds["steps"] / whole if whole else None


def as_text(moment: float) -> str:
    """Return seconds since 1970 as ISO 8601 in the time zone of this machine."""
    return datetime.fromtimestamp(round(moment, 3)).astimezone().isoformat(timespec="milliseconds")


def as_time(text: str) -> float:
    """Return the seconds since 1970 from a result of `as_text`."""
    return datetime.fromisoformat(text).timestamp()
