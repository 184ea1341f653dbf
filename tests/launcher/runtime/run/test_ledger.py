"""Every moment is charged to one bucket, and steps that are made again are lost, whatever an attempt saved before."""

from dataclasses import replace

import pytest

from plumbline.launcher.runtime.run.ledger import BUCKETS, Attempt, Ledger, goodput, total
from plumbline.launcher.runtime.run.status_file import INTERVAL, with_last


class Clock:
    """Tell the time that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


ATTEMPT = Attempt(
    queued=1000.0,
    start=1010.0,
    end=1100.0,
    host="n1",
    pid=7,
    slurm_job_id="12",
    slurm_restart_count=0,
    ranks=2,
    first_step=20,
    last_step=50,
    exit_code=None,
    why=None,
    seconds={**dict.fromkeys(BUCKETS, 0.0), "queue": 10.0, "start_up": 25.0, "steps": 65.0},
    progress=((20, 0.0), (30, 20.0), (40, 42.0), (50, 60.0)),
)
"""Made 30 steps from step 20 on, with saves at 30 and 40, and is 5 s into another step."""


def test_time_goes_to_the_bucket_that_was_entered_last() -> None:
    clock = Clock()
    ledger = Ledger(age=3.0, queue=11.0, clock=clock)
    clock.now += 2
    ledger.enter("data_wait")
    clock.now += 1
    ledger.enter("steps")
    clock.now += 4
    ledger.enter("data_wait")
    clock.now += 0.5
    assert ledger.spent("data_wait") == 1.5
    assert ledger.spent("steps") == 4
    expected = {**dict.fromkeys(BUCKETS, 0.0), "queue": 11.0, "start_up": 5.0, "steps": 4.0, "data_wait": 1.5}
    assert ledger.read() == ledger.read() == expected


@pytest.mark.parametrize(
    ("resumed_after", "lost"),
    [(51, 0.0), (50, 5.0), (40, 65.0 - 42.0), (35, 65.0 - 31.0), (30, 45.0), (20, 65.0), (0, 65.0)],
)
def test_steps_that_are_made_again_are_lost(resumed_after: int, lost: float) -> None:
    """After step 51, which the attempt made and saved without a word: the 5 s were not lost."""
    settled = ATTEMPT.without_steps_after(resumed_after)
    assert settled.seconds["lost"] == pytest.approx(lost)
    assert settled.seconds["steps"] == pytest.approx(65.0 - lost)
    assert sum(settled.seconds.values()) == pytest.approx(100.0)
    assert settled.without_steps_after(resumed_after) == settled
    earlier = settled.without_steps_after(25)
    assert earlier.seconds["steps"] == pytest.approx(min(10.0, 65.0 - lost)), "its checkpoint turns out to be damaged"


def test_an_attempt_survives_its_file() -> None:
    assert Attempt.from_json(ATTEMPT.to_json()) == ATTEMPT
    with pytest.raises(ValueError, match="no attempt of a run: KeyError 'pid'"):
        Attempt.from_json({key: value for key, value in ATTEMPT.to_json().items() if key != "pid"})


@pytest.mark.parametrize(("until", "seconds"), [(1102.0, 2.0), (5000.0, INTERVAL), (1090.0, 0.0)])
def test_the_last_moments_of_an_attempt_that_was_killed_are_lost(until: float, seconds: float) -> None:
    (closed,) = with_last([], ATTEMPT, until)
    assert closed.seconds["lost"] == seconds
    assert closed.end == 1100.0 + seconds
    assert closed.exit_code is None
    assert "killed" in str(closed.why)
    assert sum(closed.seconds.values()) == closed.end - closed.queued


def test_an_attempt_that_said_how_it_ended_is_counted_once() -> None:
    ended = replace(ATTEMPT, exit_code=85, why="stopped on request")
    assert with_last([], ended, 5000.0) == [ended], "it came to status.json alone"
    assert with_last([ended], ended, 5000.0) == [ended]
    longer = ended.extended(1130.0, "shutdown")
    assert with_last([longer], ended, 5000.0) == [longer], "its job took longer"
    assert goodput(total([longer])) == 65.0 / 130.0
    assert goodput(total([])) is None
