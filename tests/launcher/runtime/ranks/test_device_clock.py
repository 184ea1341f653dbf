"""When a device came to an event is known to the host that looks late, as to the one that waits."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from plumbline.launcher.runtime.ranks.device_clock import DeviceClock


class Device:
    """Stand for a device and its host: `now` is the host's time; the device is done with an event at a given time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.waits = 0
        self.late = 0.0
        """How long the host sleeps on when what it waits for is there."""
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@dataclass
class Event:
    device: Device
    done: float = 0.0

    def record(self) -> None:
        self.done = self.device.now + 5.0  # it has that much to do first

    def query(self) -> bool:
        return self.done <= self.device.now

    def synchronize(self) -> None:
        if self.done > self.device.now:
            self.device.waits += 1
            self.device.now = self.done + self.device.late

    def elapsed_time(self, later: Event) -> float:
        assert later.done >= self.done, "a device may not know how far back an event is"
        return 1000 * (later.done - self.done)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_a_host_that_looks_late_is_told_when_it_was(device: Device) -> None:
    clock = DeviceClock(lambda: Event(device))
    found = []
    for done, looked in ((10.0, 17.0), (30.0, 39.0), (50.0, 58.0), (60.0, 58.5)):
        device.now = max(device.now, looked)
        found.append(clock.wait(Event(device, done)))
    assert found == [10.0, 30.0, 50.0, 60.0]
    assert device.waits == 2, "once for a mark, and once for the last event, which was not there yet"


def test_a_host_that_woke_up_late_is_told_of_nothing_in_the_future(device: Device) -> None:
    clock = DeviceClock(lambda: Event(device))
    first = Event(device, 1.0)
    device.late = 0.5
    found = [clock.wait(first)]
    device.late = 0.0
    for done in (1.1, 1.2, 1.3, 1.65):
        device.now = max(device.now, done) + 0.01
        found.append(clock.wait(Event(device, done)))
        assert found[-1] <= device.now
    assert found == sorted(found)
    assert found[0] == 1.5


def test_a_host_that_waits_knows_the_time_and_asks_for_no_mark(device: Device) -> None:
    def no_mark() -> Event:
        raise AssertionError("nothing is late")

    clock = DeviceClock(no_mark)
    assert [clock.wait(Event(device, done)) for done in (3.0, 4.0)] == [3.0, 4.0]
    device.now = 9.0
    assert clock.wait(Event(device, 6.0)) == 6.0
