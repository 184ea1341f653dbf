"""Hand the lines of a run's metrics.jsonl to trackers, behind training, and keep account of what each has got.

metrics.jsonl is the truth and a tracker a copy of it. Of each tracker `trackers/NAME.json` in the run folder says by
which id it knows the run, how many lines of metrics.jsonl it has got at least, and whether it is `complete`, that is,
has got all. One that failed is not: the next start sends what it lacks before anything new. So nothing is lost by a
network that was down for a while, or by a tracker that joins late, and what a tracker has got of steps that are made
again is not sent twice.
"""

import json
import queue
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from plumbline.launcher.runtime.system.files import write_json
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.launcher.runtime.trackers.kind import TrackedRun, Tracker

Record = dict[str, Any]  # a line of metrics.jsonl
WAITING = 10_000  # lines that a tracker may be behind
PATIENCE = 60.0  # seconds that the end of a run waits for trackers


@dataclass(frozen=True)
class History:
    """Say what metrics.jsonl held when training (re)started, and from which step."""

    kept: list[Record]
    dropped: list[Record]
    """Lines of later steps, which are made again."""
    step: int


class Feed:
    """Hand lines to one tracker from a thread, until it fails: neither its speed nor its errors are training's.

    Args:
        name: of the tracker.
        kind: is opened in the thread, since it may import much and wait for a network.
        run: what it is about.
        history: what came before.
    """

    def __init__(self, name: str, kind: type[Tracker], run: TrackedRun, history: History) -> None:
        self._name, self._kind, self._run = name, kind, run
        self._file = run.folder / "trackers" / f"{name}.json"
        self._run_id: str | None = None
        self._got = self._handed = 0
        self._sent: dict[int, set[str]] = {}
        self._waiting: queue.Queue[Record | None] = queue.Queue(WAITING)
        self._over, self._is_noted = threading.Event(), False
        self._thread = threading.Thread(target=self._work, args=(history,), daemon=True)
        self._thread.start()

    def put(self, record: Record | None) -> None:
        """Take a line to hand over; None comes after the last."""
        try:
            if not self._over.is_set():
                self._waiting.put_nowait(record)
        except queue.Full:
            self._give_up(f"it is {WAITING} lines behind")

    def wait(self, until: float) -> None:
        """Wait until all lines are handed over, or until a time of `time.monotonic`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"it has not taken everything {PATIENCE:g} seconds after the end")
        if self._over.is_set() and not self._is_noted:
            self._note_failure()

    def _work(self, history: History) -> None:
        try:
            self._run_id, self._got = self._read(len(history.kept) + len(history.dropped))
            tracker = self._open(history)
            missing = history.kept[self._got :]
            self._handed = len(history.kept) - len(missing)
            self._write(is_complete=not missing)
            for record in missing:
                self._hand(tracker, record)
            self._write(is_complete=True)
            while (line := self._waiting.get()) is not None:
                self._hand(tracker, line)
            tracker.close()
        except Exception as error:  # whatever a tracker's package raises
            self._give_up(f"{type(error).__name__}: {error}")

    def _open(self, history: History) -> Tracker:
        """Open the tracker, and find out which of the lines that come it has got before."""
        step = history.step + 1
        if self._kind.rewinds and self._got < len(history.kept):  # the first line that it lacks may be there in part
            step = history.kept[self._got]["step"]
            self._got = next(number for number, record in enumerate(history.kept) if record["step"] == step)
        tracker = self._kind(self._run, self._run_id, step)
        got = [*history.kept, *history.dropped][: self._got]
        if tracker.rewinds:
            self._got = min(self._got, len(history.kept))
        for record in got:  # of the step itself as well: its evaluation came before a kill, and comes again
            if record["step"] == history.step or (record["step"] > history.step and not tracker.rewinds):
                self._sent.setdefault(record["step"], set()).update(record)
        self._run_id = tracker.run_id
        TRAINING.info(f"{self._name}: {tracker.where}")
        return tracker

    def _hand(self, tracker: Tracker, record: Record) -> None:
        """Hand over the numbers of a line that the tracker has not got: of several lines of a step, `tokens` once."""
        if self._over.is_set():
            return
        step = record["step"]
        sent = self._sent.setdefault(step, set())
        values = {
            key if "/" in key else f"train/{key}": float(value)
            for key, value in record.items()
            if isinstance(value, (int, float)) and key != "step" and key not in sent
        }
        if values:
            tracker.add(step, values)
        sent.update(record)
        self._sent = {other: keys for other, keys in self._sent.items() if other >= step}
        self._handed += 1
        self._got = max(self._got, self._handed)

    def _give_up(self, why: str) -> None:
        """Hand over nothing more, and note where to go on."""
        if self._over.is_set():
            return
        self._over.set()
        LOG.warning(f"{self._name}: {why}: it gets nothing more until the next start, which sends what it lacks")
        self._note_failure()

    def _note_failure(self) -> None:
        with suppress(OSError):  # a full disk may be why it failed
            self._write(is_complete=False)
            self._is_noted = True

    def _read(self, lines: int) -> tuple[str | None, int]:
        """Return the id of the run, and how many of so many lines the tracker has got."""
        if not self._file.exists():
            return None, 0
        try:
            state = json.loads(self._file.read_text(encoding="utf-8"))
            return state["run_id"], max(state["lines"], lines) if state["complete"] else state["lines"]
        except (ValueError, KeyError, TypeError) as error:
            LOG.warning(f"{self._file} is damaged ({error!r}): {self._name} begins a new run, with all numbers")
            return None, 0

    def _write(self, is_complete: bool) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._file, {"run_id": self._run_id, "lines": self._got, "complete": is_complete})


def finish(feeds: Iterable[Feed]) -> None:
    """Hand over what waits, for a while."""
    feeds = list(feeds)
    for feed in feeds:
        feed.put(None)
    until = time.monotonic() + PATIENCE
    for feed in feeds:
        feed.wait(until)
