"""Determine when a GPU finished something, even if the host looks much later, by the times between events."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """Represent a point in a device's work, like a torch.cuda.Event with timing."""

    def record(self) -> None:
        """Place the event after all work queued so far."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds between this event and a later one."""


def timing_event() -> Event:
    """Return an event of the current GPU with timing."""
    return torch.cuda.Event(enable_timing=True)


class DeviceClock:
    """Determine, by the host's clock, when a device reached each of its events, which must be passed in order.

    If the host has to wait for the event, the time is now. If the event has passed, the time follows from the device's
    time since the previous event. If the first event has passed, the host waits for a new event and counts back.

    Args:
        make_event: returns an event with timing.
    """

    def __init__(self, make_event: Callable[[], Event] = timing_event) -> None:
        self._make_event = make_event
        self._last: tuple[Event, float] | None = None

    def wait(self, event: Event) -> float:
        """Wait for an event, and return when the device reached it, by `time.perf_counter`."""
        over = event.query()
        event.synchronize()
        when = time.perf_counter()
        if over and self._last is None:
            mark = self._make_event()
            mark.record()
            mark.synchronize()
            when = time.perf_counter() - event.elapsed_time(mark) / 1000
        elif over and self._last is not None:
            before, then = self._last
            when = min(when, then + before.elapsed_time(event) / 1000)  # correct a host that woke up late
        self._last = event, when
        return when
