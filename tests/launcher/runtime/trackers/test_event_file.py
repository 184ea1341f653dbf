"""TensorBoard shows every point of a run once and in order, whatever the clocks of its hosts said."""

import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from plumbline.launcher.runtime.trackers.event_file import EventFile

HOUR = 3600.0


class Clock:
    """Stand in for the clocks of the hosts that a run has come to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_800_000_000.0
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def attempt(folder: Path, clock: Clock, steps: range, value: float) -> None:
    """Make steps of a minute each, from where a checkpoint was."""
    file = EventFile(folder, steps[0])
    for step in steps:
        clock.now += 60
        file.add(step, {"train/loss": value + step})
    file.close()


def points(folder: Path) -> list[tuple[int, float, float]]:
    """Return step, value and time as TensorBoard reads them."""
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    return [(event.step, event.value, event.wall_time) for event in board.Scalars("train/loss")]


def test_no_point_is_lost_when_a_clock_is_behind(tmp_path: Path, clock: Clock) -> None:
    """Two restarts: on a host an hour behind, then on one that is right; each makes some steps again."""
    attempt(tmp_path, clock, range(1, 61), 0.0)
    clock.now -= HOUR
    attempt(tmp_path, clock, range(51, 91), 1000.0)
    clock.now += HOUR
    attempt(tmp_path, clock, range(81, 121), 2000.0)
    found = points(tmp_path)
    assert [step for step, *_ in found] == list(range(1, 121))
    assert [value - step for step, value, _ in found] == [0.0] * 50 + [1000.0] * 30 + [2000.0] * 40
    times = [at for *_, at in found]
    assert times == sorted(times)


def test_restarts_within_a_second_are_read_in_their_order(tmp_path: Path, clock: Clock) -> None:
    for value in (0.0, 1000.0, 2000.0):
        file = EventFile(tmp_path, 1)
        file.add(1, {"train/loss": value})
        file.close()
    assert [value for _, value, _ in points(tmp_path)] == [2000.0]
    assert len(list(tmp_path.iterdir())) == 3


def test_files_of_torchs_writer_come_first(tmp_path: Path, clock: Clock) -> None:
    clock.now += HOUR
    board = SummaryWriter(str(tmp_path))
    for step in (1, 2, 3):
        board.add_scalar("train/loss", step, step)
    board.close()
    clock.now -= HOUR
    attempt(tmp_path, clock, range(3, 5), 1000.0)
    assert [value for _, value, _ in points(tmp_path)] == [1.0, 2.0, 1003.0, 1004.0]


@pytest.mark.parametrize("damage", ["cut", "zeros", "empty", "noise"])
def test_what_a_kill_left_of_the_last_file_stops_nobody(tmp_path: Path, clock: Clock, damage: str) -> None:
    attempt(tmp_path, clock, range(1, 4), 0.0)
    (first,) = tmp_path.iterdir()
    content = first.read_bytes()
    first.write_bytes(
        {"cut": content[:-7], "zeros": content + bytes(99), "empty": b"", "noise": b"\1\0\0\0\0\0\0\0" + b"\xff" * 9}[
            damage
        ]
    )
    clock.now -= HOUR
    attempt(tmp_path, clock, range(3, 5), 1000.0)
    late = [(step, value, at) for step, value, at in points(tmp_path) if step > 2]
    assert [value for _, value, _ in late] == [1003.0, 1004.0]
    if damage in ("cut", "zeros"):
        assert late[0][2] >= 1_800_000_000.0 + 120, "no earlier than what is whole in the file before"
