"""Account for the wall-clock time of a run: one clock, which charges every moment to one bucket, over all attempts.

An attempt is one start of the run, from the launch of its rank 0 to the end. Its time begins where that of the attempt
before ended, so that the attempts of a run add up to the time since it was first begun, and nothing is left over but
what passed while it was complete, until it was made longer.
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
    """Charge the time of this process to one bucket after the other, first to `start_up`; threads may read it.

    Args:
        age: seconds of start-up that are over already.
        queue: seconds before the attempt.
        clock: tells seconds.
    """

    def __init__(self, age: float = 0.0, queue: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.bucket: Bucket = "start_up"
        self._clock, self._lock = clock, threading.Lock()
        self._since = clock() - age
        self._seconds: dict[str, float] = {**dict.fromkeys(BUCKETS, 0.0), "queue": queue}

    def enter(self, bucket: Bucket) -> None:
        """Charge the time until now to the bucket of before, and the time from now on to another."""
        with self._lock:
            now = self._clock()
            self._seconds[self.bucket] += now - self._since
            self.bucket, self._since = bucket, now

    def lose(self, seconds: float) -> None:
        """Move time that was spent on steps to `lost`: they are made again."""
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
    """Say when an attempt was, where, how far it came, how it ended and where its time went; as far as it has come.

    The seconds of its buckets add up to the time from `queued` to `end`.
    """

    queued: float
    """When its time begins: the end of the attempt before; of the first, and of one that makes a complete run longer,
    when its Slurm job was submitted."""
    start: float
    """When its Slurm job got its nodes, or else its rank 0 was launched."""
    end: float
    """Until when its time is accounted for."""
    host: str
    pid: int
    slurm_job_id: str | None
    slurm_restart_count: int | None
    ranks: int
    first_step: int | None
    """The step after which it went on; None before it has come to that."""
    last_step: int | None
    exit_code: int | None
    """None while it runs, and of one that was killed."""
    why: str | None
    """How it ended, in words."""
    seconds: dict[str, float]
    progress: tuple[tuple[int, float], ...]
    """Steps with the seconds in bucket `steps` until then: that after which it went on, those at which it saved, and
    the last; without those that are lost."""

    @property
    def was_refused(self) -> bool:
        """Return whether it ended before it came to training, for what was asked of it could not be done."""
        return self.exit_code == UNUSABLE and self.first_step is None

    def is_of(self, other: "Attempt") -> bool:
        """Return whether two records are of one attempt."""
        return (self.host, self.pid, self.start) == (other.host, other.pid, other.start)

    def extended(self, until: float, bucket: Bucket) -> "Attempt":
        """Return the attempt with the time since its end charged to a bucket."""
        passed = max(0.0, until - self.end)
        return replace(self, end=self.end + passed, seconds=moved(self.seconds, passed, bucket))

    def without_steps_after(self, step: int) -> "Attempt":
        """Return the attempt with what it spent on steps after `step`, which are made again, moved to `lost`."""
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
        """Return the attempt of an object of attempts.jsonl.

        Raises:
            ValueError: it lacks a key, or has something else in its place.
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
    """Return the seconds that an attempt spent on its steps up to one of them; between two points, in proportion."""
    before = progress[0]
    for point in progress:
        if point[0] >= step:
            share = 1.0 if point[0] == before[0] else (step - before[0]) / (point[0] - before[0])
            return before[1] + max(0.0, share) * (point[1] - before[1])
        before = point
    return before[1]


def moved(seconds: dict[str, float], amount: float, to: Bucket, origin: Bucket | None = None) -> dict[str, float]:
    """Return the seconds of buckets with some more in one of them, and less in another if one is named."""
    changed = {**seconds, to: seconds[to] + amount}
    return changed if origin is None else {**changed, origin: seconds[origin] - amount}


def total(attempts: Iterable[Attempt]) -> dict[str, float]:
    """Return the seconds of each bucket over some attempts."""
    taken = [attempt.seconds for attempt in attempts]
    return {bucket: sum(seconds[bucket] for seconds in taken) for bucket in BUCKETS}


def goodput(seconds: dict[str, float]) -> float | None:
    """Return the share of steps, made once, in all time; None before there is any."""
    whole = sum(seconds.values())
    return seconds["steps"] / whole if whole else None


def as_text(moment: float) -> str:
    """Return seconds since 1970 as ISO 8601 with the zone of this machine."""
    return datetime.fromtimestamp(round(moment, 3)).astimezone().isoformat(timespec="milliseconds")


def as_time(text: str) -> float:
    """Return seconds since 1970 of what `as_text` wrote."""
    return datetime.fromisoformat(text).timestamp()
