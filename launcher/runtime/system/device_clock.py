"""Tell when a GPU had done something, where the host looks much later: by events that know their distances."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """Stand for a place in a device's work, as torch.cuda.Event does that was made to tell the time."""

    def record(self) -> None:
        """Put it behind all that the device was given."""

    def query(self) -> bool:
        """Return whether the device has come there."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds between this place and a later one."""


def timing_event() -> Event:
    """Return an event of the current GPU that tells the time."""
    return torch.cuda.Event(enable_timing=True)


class DeviceClock:
    """Tell by the host's clock when a device came to each of its events, which are asked for in their order.

    The host may wait for the event: then it is now. Or the event is over: then it is as long after the one before as
    the device says. Or it is over and the first: then the host waits for a mark behind it, and counts back.

    Args:
        make_event: returns an event that tells the time.
    """

    def __init__(self, make_event: Callable[[], Event] = timing_event) -> None:
        self._make_event = make_event
        self._last: tuple[Event, float] | None = None

    def wait(self, event: Event) -> float:
        """Wait for an event, and return when it was, by `time.perf_counter`."""
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
            when = min(when, then + before.elapsed_time(event) / 1000)  # a host that woke up late had `then` too late
        self._last = event, when
        return when
