"""A tracker gets every line of metrics.jsonl once, whatever fails, and training never hears of it."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from plumbline.launcher.runtime.run.interventions import Intervention, read_interventions, write_interventions
from plumbline.launcher.runtime.run.metrics import MetricsLog
from plumbline.launcher.runtime.trackers import feed
from plumbline.launcher.runtime.trackers.feed import Feed, History
from plumbline.launcher.runtime.trackers.kind import TrackedRun, Tracker, without_secrets

LOSS = "train/loss"


class Notebook(Tracker):
    """Keep points in a file that outlives attempts; fail where it is told to."""

    fails_at: ClassVar[int | None] = None
    opens: ClassVar[bool] = True
    waits_for: ClassVar[threading.Event | None] = None

    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None:  # noqa: ARG002
        if not self.opens:
            raise ConnectionError("nobody answers")
        self.run_id, self.where = run_id or "first", "a notebook"
        self._file = run.folder / "notebook"

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if self.waits_for is not None:
            self.waits_for.wait()
        if step == self.fails_at:
            raise ConnectionError("the network is down")
        with self._file.open("a") as file:
            file.writelines(json.dumps([self.run_id, step, key, value]) + "\n" for key, value in values.items())

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _works() -> None:
    Notebook.fails_at, Notebook.opens, Notebook.waits_for = None, True, None


def line(step: int, attempt: int = 1) -> dict[str, Any]:
    return {"step": step, "tokens": 10 * step, "loss": attempt + step / 100, "mfu": None}


def attempt(folder: Path, *lines: dict[str, Any], step: int = 0, notes: bool = True) -> list[Feed]:
    """Write lines from a step on, with a notebook or without one."""
    opened: list[Feed] = []

    def feeds(history: History) -> list[Feed]:
        if notes:
            opened.append(Feed("notebook", Notebook, TrackedRun(folder, "tests", {}, {}), history))
        return opened

    log = MetricsLog(folder, step, 1000, feeds)
    for record in lines:
        log.write(record)
    log.close()
    return opened


def lines(*steps: int, attempt: int = 1) -> list[dict[str, Any]]:
    return [line(step, attempt) for step in steps]


def points(folder: Path, key: str = LOSS) -> list[tuple[int, float]]:
    file = folder / "notebook"
    noted = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    assert {run for run, *_ in noted} <= {"first"}, "every attempt is the same run"
    return [(step, value) for _, step, other, value in noted if other == key]


def test_numbers_go_under_their_keys_and_tokens_once_for_each_step(tmp_path: Path) -> None:
    attempt(tmp_path, line(1), {"step": 1, "tokens": 10, "eval/text/loss": 3.0}, {**line(2), "skipped": True})
    assert points(tmp_path) == [(1, 1.01), (2, 1.02)]
    assert points(tmp_path, "eval/text/loss") == [(1, 3.0)]
    assert points(tmp_path, "train/tokens") == [(1, 10.0), (2, 20.0)]
    assert points(tmp_path, "train/skipped") == [(2, 1.0)]
    assert not points(tmp_path, "train/step")
    assert not points(tmp_path, "train/mfu")


def test_steps_that_are_made_again_are_not_sent_again(tmp_path: Path) -> None:
    """Three attempts from the same checkpoint, the second of which gets less far than the first."""
    attempt(tmp_path, *lines(1, 2, 3, 4, 5, 6), {"step": 6, "tokens": 60, "stream/rms/00": 1.0})
    attempt(tmp_path, *lines(3, 4, attempt=2), step=2)
    attempt(tmp_path, *lines(3, 4, 5, 6, 7, attempt=3), step=2)
    assert points(tmp_path) == [(1, 1.01), (2, 1.02), (3, 1.03), (4, 1.04), (5, 1.05), (6, 1.06), (7, 3.07)]


def reject(folder: Path, back_to: int, last: int) -> None:
    """Note that a guard sent the run back."""
    made = Intervention("2026-01-01T00:00:00+00:00", "spike", "loss", back_to + 1, last, back_to, (back_to, last))
    write_interventions(folder, [*read_interventions(folder), made])


def test_steps_that_a_guard_rejected_are_sent_as_they_were_made_again(tmp_path: Path) -> None:
    evaluation = {"step": 2, "tokens": 20, "eval/text/loss": 3.0}
    attempt(tmp_path, *lines(1, 2), evaluation, *lines(3, 4))
    reject(tmp_path, back_to=2, last=4)
    attempt(tmp_path, evaluation, *lines(3, 4, attempt=2), step=2)
    attempt(tmp_path, *lines(4, 5, attempt=3), step=3)
    assert points(tmp_path) == [(1, 1.01), (2, 1.02), (3, 1.03), (4, 1.04), (3, 2.03), (4, 2.04), (5, 3.05)]
    assert points(tmp_path, "eval/text/loss") == [(2, 3.0)], "the model of the checkpoint is the same"


def test_rejected_steps_are_sent_again_by_the_first_start_that_can(tmp_path: Path) -> None:
    attempt(tmp_path, *lines(1, 2, 3, 4))
    reject(tmp_path, back_to=2, last=4)
    Notebook.opens = False
    attempt(tmp_path, *lines(3, 4, 5, attempt=2), step=2)
    reject(tmp_path, back_to=4, last=5)
    Notebook.opens = True
    attempt(tmp_path, *lines(5, attempt=3), step=4)
    assert points(tmp_path) == [(1, 1.01), (2, 1.02), (3, 1.03), (4, 1.04), (3, 2.03), (4, 2.04), (5, 3.05)]


def test_an_evaluation_that_a_kill_prevented_is_sent(tmp_path: Path) -> None:
    evaluation = {"step": 2, "tokens": 20, "eval/text/loss": 3.0}
    attempt(tmp_path, *lines(1, 2))
    attempt(tmp_path, evaluation, line(3), step=2)
    attempt(tmp_path, evaluation, line(3), step=2)
    assert points(tmp_path, "eval/text/loss") == [(2, 3.0)]
    assert [step for step, _ in points(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("failure", ["midway", "at the start"])
def test_what_a_failed_tracker_lacks_comes_at_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failure: str
) -> None:
    if failure == "midway":
        Notebook.fails_at = 3
    else:
        Notebook.opens = False
    attempt(tmp_path, *lines(1, 2, 3, 4, 5))
    told = capsys.readouterr().err
    assert told.count("warning: notebook: ConnectionError: ") == 1
    assert points(tmp_path) == ([(1, 1.01), (2, 1.02)] if failure == "midway" else [])
    Notebook.fails_at, Notebook.opens = None, True
    attempt(tmp_path, *lines(5, 6, attempt=2), step=4)
    assert points(tmp_path) == [(1, 1.01), (2, 1.02), (3, 1.03), (4, 1.04), (5, 2.05), (6, 2.06)]


def test_no_password_of_an_address_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("request to https://me:pass@word@host/api?token=t0p failed")

    monkeypatch.setattr(Notebook, "add", fail)
    attempt(tmp_path, line(1))
    assert "notebook: ConnectionError: request to https://host/api failed: it gets" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:p4ss@host:5000/base", "https://host:5000/base"),
        ("https://me@host/base?api_key=1#x", "https://host/base"),
        ("postgresql+psycopg2://me:p/?#ss@host/db", "postgresql+psycopg2://host/db"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:////scratch/a@b/mlflow.db", "sqlite:////scratch/a@b/mlflow.db"),
        ("databricks", "databricks"),
    ],
)
def test_an_address_is_shown_without_its_secrets(address: str, shown: str) -> None:
    assert without_secrets(address) == shown


def test_one_that_cannot_be_opened_after_a_kill_sends_nothing_twice(tmp_path: Path) -> None:
    attempt(tmp_path, *lines(1, 2, 3, 4, 5))
    Notebook.opens = False
    attempt(tmp_path, *lines(3, 4, 5, 6, 7, attempt=2), step=2)
    Notebook.opens = True
    attempt(tmp_path, *lines(7, 8, attempt=3), step=6)
    assert points(tmp_path) == [(1, 1.01), (2, 1.02), (3, 1.03), (4, 1.04), (5, 1.05), (6, 2.06), (7, 3.07), (8, 3.08)]


def test_one_that_joins_late_gets_the_whole_run(tmp_path: Path) -> None:
    attempt(tmp_path, *lines(1, 2, 3), notes=False)
    attempt(tmp_path, *lines(3, 4), step=2)
    assert [step for step, _ in points(tmp_path)] == [1, 2, 3, 4]


def test_one_that_does_not_answer_holds_up_neither_training_nor_its_end_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feed, "PATIENCE", 0.2)
    monkeypatch.setattr(feed, "INTERVAL", 0.0)  # what it notes last is not what it noted first
    Notebook.waits_for = threading.Event()
    (feed_of_it,) = attempt(tmp_path, line(1))
    assert "warning: notebook: it has not taken everything 0.2 seconds after the end" in capsys.readouterr().err
    Notebook.waits_for.set()
    feed_of_it._thread.join()  # what it was at when it was given up
    assert not json.loads((tmp_path / "trackers" / "notebook.json").read_text())["complete"]
    attempt(tmp_path, line(2), step=1)
    assert {step for step, _ in points(tmp_path)} == {1, 2}


def test_one_that_is_far_behind_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or lines would fill the memory of rank 0 in the months of a run."""
    monkeypatch.setattr(feed, "WAITING", 2)
    monkeypatch.setattr(feed, "PATIENCE", 0.0)
    Notebook.waits_for = threading.Event()
    attempt(tmp_path, *lines(1, 2, 3, 4, 5, 6))
    assert capsys.readouterr().err.count("warning: notebook: it is 2 lines behind") == 1
    Notebook.waits_for.set()


@pytest.mark.parametrize("damage", [lambda text: text[:-9], lambda _: "[]", lambda _: "{}"])
def test_a_damaged_account_begins_a_new_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[str], str]
) -> None:
    attempt(tmp_path, *lines(1, 2))
    file = tmp_path / "trackers" / "notebook.json"
    file.write_text(damage(file.read_text()))
    attempt(tmp_path, *lines(3), step=2)
    assert f"{file} is damaged" in capsys.readouterr().err
    assert [step for step, _ in points(tmp_path)] == [1, 2, 1, 2, 3]
