"""When a device came to an event is known to the host that looks late, as to the one that waits."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from plumbline.launcher.runtime.system.device_clock import DeviceClock


class Device:
    """Stand for a device and its host: `now` is the host's time; the device is done with an event at a given time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.waits = 0
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
        self.device.waits += self.done > self.device.now
        self.device.now = max(self.device.now, self.done)

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


def test_a_host_that_waits_knows_the_time_and_asks_for_no_mark(device: Device) -> None:
    def no_mark() -> Event:
        raise AssertionError("nothing is late")

    clock = DeviceClock(no_mark)
    assert [clock.wait(Event(device, done)) for done in (3.0, 4.0)] == [3.0, 4.0]
    device.now = 9.0
    assert clock.wait(Event(device, 6.0)) == 6.0
