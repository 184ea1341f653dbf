"""Send the lines of a run's metrics.jsonl to trackers in the background, and record what each has received.

metrics.jsonl is authoritative, and a tracker holds a copy of it. For each tracker, `trackers/NAME.json` in the run
folder records the tracker's id of the run, the step up to which it has received everything, and whether it is
`complete`, that is, has received all existing lines. If a tracker failed, it is not complete, and the next start sends
the missing lines before new ones. So no numbers are lost while a network is down, or for a tracker that is added later.
Steps that a resumed run repeats are not sent twice, unless a guard had rejected them, because then the repeated steps
have other numbers; `interventions` is the number of such rollbacks that the tracker's copy already reflects.
"""

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from plumbline.launcher.runtime.system.files import write_json
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.launcher.runtime.trackers.kind import TrackedRun, Tracker, without_secrets

Record = dict[str, Any]  # a line of metrics.jsonl
WAITING = 10_000  # lines that may be queued for a tracker
INTERVAL = 5.0  # seconds between two saved positions of a tracker that is behind
PATIENCE = 60.0  # seconds that the end of a run waits for trackers


@dataclass(frozen=True)
class History:
    """Describe the contents of metrics.jsonl when training (re)started, and the step from which it started."""

    kept_since: Callable[[int], Iterable[Record]]
    """Returns its lines of a step and later ones, in order."""
    dropped: list[Record]
    """Lines of later steps, which training will repeat."""
    step: int
    returns: list[int]
    """Steps to which guards have sent the run back, in order, since it began."""


class Position:
    """Record what a tracker has received: everything before a step, and some keys of that step.

    Args:
        step: the step that it has reached.
        keys: keys of that step's lines that it has received.
    """

    def __init__(self, step: int = -1, keys: Iterable[str] = ()) -> None:
        self.step, self.keys = step, set(keys)

    def lacks(self, record: Record) -> set[str]:
        """Return the keys of a line that the tracker lacks; `tokens`, in several lines of a step, is sent once."""
        if record["step"] < self.step:
            return set()
        return set(record) - (self.keys if record["step"] == self.step else set())

    def take(self, record: Record) -> None:
        """Mark a line as received."""
        if record["step"] > self.step:
            self.step, self.keys = record["step"], set()
        if record["step"] == self.step:
            self.keys |= set(record)


class Feed:
    """Send lines to one tracker from a thread until it fails, so that its speed and errors do not affect training.

    Args:
        name: name of the tracker.
        kind: class of the tracker, opened in the thread, since it may import much and wait for a network.
        run: description of the run.
        history: contents of metrics.jsonl so far.
    """

    def __init__(self, name: str, kind: type[Tracker], run: TrackedRun, history: History) -> None:
        self._name, self._kind, self._run, self._history = name, kind, run, history
        self._file = run.folder / "trackers" / f"{name}.json"
        self._run_id: str | None = None
        self._got, self._interventions = Position(), 0
        self._missing: deque[Record] = deque()
        self._waiting: queue.Queue[Record | None] = queue.Queue(WAITING)
        self._noted, self._was_complete = float("-inf"), False
        self._over, self._is_failure_noted = threading.Event(), False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, record: Record | None) -> None:
        """Queue a line to send; None marks the end."""
        try:
            if not self._over.is_set():
                self._waiting.put_nowait(record)
        except queue.Full:
            self._give_up(f"it is {WAITING} lines behind")

    def wait(self, until: float) -> None:
        """Wait until all lines are sent, or until a time of `time.monotonic`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"it has not taken everything {PATIENCE:g} seconds after the end")
        if self._over.is_set() and not self._is_failure_noted:
            self._note_failure()

    def _work(self) -> None:
        try:
            self._read()
            tracker = self._open()
            del self._history  # may be large
            self._keep_account()
            while (line := self._missing.popleft() if self._missing else self._waiting.get()) is not None:
                if self._over.is_set():
                    return
                self._hand(tracker, line)
                if time.monotonic() - self._noted >= INTERVAL:
                    self._keep_account()
            if not self._over.is_set():
                self._keep_account()
                tracker.close()
        except Exception as error:  # whatever a tracker's package raises
            self._give_up(f"{type(error).__name__}: {error}")

    def _open(self) -> Tracker:
        """Open the tracker, and queue the existing lines that it lacks."""
        history, void = self._history, self._history.step + 1
        missing = [record for record in history.kept_since(self._got.step) if self._got.lacks(record)]
        if self._kind.rewinds and missing:  # it may already have part of the first of them
            void = missing[0]["step"]
            self._got = Position(void)
            missing = [*history.kept_since(void)]
        tracker = self._kind(self._run, self._run_id, void)
        if self._kind.rewinds and not missing and self._got.step >= void:
            self._got = self._position_at(history.step)
        self._missing.extend(missing)
        self._run_id = tracker.run_id
        if tracker.where is not None:
            TRAINING.info(f"{self._name}: {tracker.where}")
        return tracker

    def _hand(self, tracker: Tracker, record: Record) -> None:
        """Send the numbers of a line that the tracker lacks."""
        keys = self._got.lacks(record) - {"step"}
        values = {
            key if "/" in key else f"train/{key}": float(value)
            for key, value in record.items()
            if key in keys and isinstance(value, (int, float))
        }
        if values:
            tracker.add(record["step"], values)
        self._got.take(record)

    def _give_up(self, why: str) -> None:
        """Stop sending, and save where to continue."""
        if self._over.is_set():
            return
        self._over.set()
        LOG.warning(
            f"{self._name}: {without_secrets(why)}: it gets nothing more before the next start, if there is one"
        )
        self._note_failure()

    def _note_failure(self) -> None:
        with suppress(OSError):  # a full disk may be why it failed
            self._write(is_complete=False)
            self._is_failure_noted = True

    def _keep_account(self) -> None:
        """Save its position, unless it is complete and was already saved as such."""
        self._noted = time.monotonic()
        is_complete = not self._missing and self._waiting.empty()
        if not (is_complete and self._was_complete):
            self._write(is_complete)
            self._was_complete = is_complete

    def _read(self) -> None:
        """Read the id of the run, and which lines that still count the tracker has received."""
        returns = self._history.returns
        self._interventions = len(returns)
        if not self._file.exists():
            return
        try:
            state = json.loads(self._file.read_text(encoding="utf-8"))
            self._run_id, self._got = state["run_id"], Position(state["step"], state["keys"])
            is_complete = bool(state["complete"])
        except (ValueError, KeyError, TypeError) as error:
            LOG.warning(f"{self._file} is damaged ({error!r}): {self._name} begins a new run, with all numbers")
            return
        if is_complete:
            for record in self._lines_since(self._got.step):
                self._got.take(record)
        back_to = min(returns[state.get("interventions", 0) :], default=self._got.step)
        if back_to < self._got.step:
            self._got = self._position_at(back_to)

    def _position_at(self, step: int) -> Position:
        """Return the position after all lines up to a step, including its evaluations."""
        return Position(step, {key for record in self._lines_since(step) if record["step"] == step for key in record})

    def _lines_since(self, step: int) -> list[Record]:
        """Return what metrics.jsonl held of a step and later ones before lines were dropped."""
        return [*self._history.kept_since(step), *self._history.dropped]

    def _write(self, is_complete: bool) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        state = {"run_id": self._run_id, "step": self._got.step, "keys": sorted(self._got.keys)}
        write_json(self._file, {**state, "complete": is_complete, "interventions": self._interventions})


def finish(feeds: Iterable[Feed]) -> None:
    """Send what is queued, up to a time limit."""
    feeds = list(feeds)
    for feed in feeds:
        feed.put(None)
    until = time.monotonic() + PATIENCE
    for feed in feeds:
        feed.wait(until)
