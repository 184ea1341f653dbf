"""When a run asks itself to stop: by what Slurm says, again and again, and by how long a stop takes."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from plumbline.launcher.runtime.cluster import deadline
from plumbline.launcher.runtime.cluster.deadline import END, NOTICE, read_notice, watch, watch_time_limit
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.signals import StopRequest
from tests.launcher.runtime.system.test_signals import handlers_kept


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopRequest]:
    monkeypatch.delenv(END, raising=False)
    with handlers_kept():
        yield StopRequest()


def ends_in(seconds: float) -> float:
    return time.time() + seconds


def test_it_asks_once_less_time_is_left_than_the_notice(stop: StopRequest, capsys: pytest.CaptureFixture[str]) -> None:
    watch(stop, 300, lambda: ends_in(252.5))
    assert stop
    assert stop.reason == "ahead of the time limit"
    assert capsys.readouterr().err == "time limit in 4:12: saving\n"


@pytest.mark.parametrize(("step", "save", "left"), [(20, 0, 38), (0, 10, 18), (10, 10, 38)])
def test_a_stop_that_takes_longer_than_the_notice_is_asked_for_earlier(
    stop: StopRequest, step: float, save: float, left: float
) -> None:
    """Two steps have to end, the save that is under way, and another."""
    stop.step_seconds, stop.save_seconds = step, save
    answers = iter([ends_in(left)])
    watch(stop, 1, lambda: next(answers), 0.0)  # asked a second time, there is none
    assert stop


Watching = Callable[..., threading.Event]


@pytest.fixture
def watching(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    """Watch in threads that look and ask all the time and end with the test; the event is set at the last answer."""
    monkeypatch.setattr(deadline, "LOOK_SECONDS", 0.01)
    over, threads = threading.Event(), list[threading.Thread]()

    def begin(*answers: float | None) -> threading.Event:
        given, last = iter(answers), threading.Event()

        def ask() -> float | None:
            if over.is_set():
                return ends_in(0)
            answer = next(given, answers[-1])
            if answer == answers[-1]:
                last.set()
            return answer

        threads.append(threading.Thread(target=watch, args=(stop, 1, ask, 0.0), daemon=True))
        threads[-1].start()
        return last

    yield begin
    over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def comes_up(stop: StopRequest) -> bool:
    """Wait for a request; returns whether it came."""
    deadline = time.monotonic() + 60
    while not stop and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(stop)


def test_a_limit_that_is_lowered_is_noticed(stop: StopRequest, watching: Watching) -> None:
    lowered = watching(ends_in(3600), ends_in(0.5))
    assert lowered.wait(60)
    assert comes_up(stop)


def test_a_controller_that_does_not_answer_changes_nothing(
    stop: StopRequest, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it said last holds, and at first what Slurm said when the job began."""
    monkeypatch.setenv(END, str(ends_in(3600)))
    silent = watching(ends_in(3600), None)
    assert silent.wait(60)
    assert not stop
    monkeypatch.setenv(END, str(ends_in(0.5)))
    watching(None)
    assert comes_up(stop)


def test_the_end_of_a_job_that_has_ended_says_nothing(
    stop: StopRequest, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell outlives its allocation, and keeps its variables."""
    monkeypatch.setenv(END, "1000")
    assert watching(None, ends_in(3600)).wait(60)
    assert not stop


def test_the_notice_is_a_number_of_seconds(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NOTICE, raising=False)
    assert read_notice() == 300
    monkeypatch.setenv(NOTICE, "45")
    assert read_notice() == 45
    monkeypatch.setenv(NOTICE, "5 minutes")
    for is_main in (True, False):  # or the other ranks would wait for the main one
        with pytest.raises(ValueError, match="PLUMBLINE_NOTICE is 5 minutes: give the seconds before"):
            watch_time_limit(stop, is_main)


def test_the_main_rank_of_a_job_watches_alone(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(END, str(ends_in(1)))
    monkeypatch.setenv("PATH", "/nowhere")  # no Slurm to ask
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    before = threading.active_count()
    watch_time_limit(stop, is_main=True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    watch_time_limit(stop, is_main=False)
    assert threading.active_count() == before
    LOG.disabled = True
    try:
        watch_time_limit(stop, is_main=True)
        assert comes_up(stop)
    finally:
        LOG.disabled = False
