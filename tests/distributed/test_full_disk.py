"""A disk that is full while a run saves, logs and ends: nothing is lost, and what can go on goes on."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.checkpoint import store
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.run.metrics import MetricsLog
from plumbline.launcher.runtime.system.exit_codes import REQUEUE, UNSAVED
from plumbline.launcher.runtime.system.files import write_json
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train import loop
from plumbline.launcher.runtime.train.train import train
from tests.conftest import Run
from tests.disks import fill, free, small_disk
from tests.launcher.runtime.run.test_metrics import board, no_trackers, points, read, step_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Pretrain, Start


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 16 MB."""
    with small_disk(tmp_path / "disk") as folder:
        yield folder


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    fill(disk)
    try:
        yield
    finally:
        free(disk)


def assert_whole(run: Run, last: int) -> None:
    """Assert that no line of the log is missing, and no checkpoint broken."""
    assert list(run.column("loss")) == list(range(1, last + 1))
    for folder in store.checkpoints(run.folder / "checkpoints"):
        assert store.problems(folder, contents=True) == []


def test_a_run_lasts_out_a_disk_that_is_full_for_a_while(start_pretrain: Start, tiny_config: Path, disk: Path) -> None:
    overrides = ["train.steps=50000", "train.eval_interval=null", f"run.root={disk}"]
    job = start_pretrain(tiny_config, "while", overrides, ranks=2)
    run = Run(disk / "while")
    job.wait_until(lambda: "step_00000010" in run.checkpoints)
    with filled(disk):
        job.wait_until(lambda: "metrics.jsonl cannot be written (" in job.texts()[1])
        job.wait_until(lambda: job.texts()[1].count("checkpoint not written (rank ") >= 2)
        kept = store.checkpoints(run.folder / "checkpoints")
        assert kept
        assert all(store.problems(folder, contents=True) == [] for folder in kept)
    job.wait_until(
        lambda: max(map(store.step_of, store.checkpoints(run.folder / "checkpoints"))) > 10 + store.step_of(kept[0])
    )
    for process in job.processes:
        process.send_signal(signal.SIGTERM)
    outcome = job.wait()
    assert outcome.code == REQUEUE, outcome.stderr
    assert "metrics.jsonl can be written again, and lacks nothing" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert_whole(run, store.step_of(store.checkpoints(run.folder / "checkpoints")[0]))


def test_a_disk_that_stays_full_ends_the_run_with_one_error_and_the_same_command_goes_on(
    start_pretrain: Start, run_pretrain: Pretrain, tiny_config: Path, disk: Path
) -> None:
    overrides = ["train.eval_interval=null", f"run.root={disk}", "checkpoint.max_failures=2", "run.name=stays"]
    job = start_pretrain(tiny_config, "stays", [*overrides, "train.steps=50000"], ranks=1)
    run = Run(disk / "stays")
    job.wait_until(lambda: "step_00000010" in run.checkpoints)
    with filled(disk):
        outcome = job.wait()
    assert outcome.code == UNSAVED
    assert len([line for line in outcome.stderr.splitlines() if line.startswith("error: ")]) == 1, outcome.stderr
    assert "2 checkpoints in a row were not written" in outcome.stderr
    assert "metrics.jsonl lacks its last " in outcome.stderr
    assert "Traceback" not in outcome.stderr
    saved = store.step_of(store.checkpoints(run.folder / "checkpoints")[0])
    again = run_pretrain(tiny_config, "stays", [*overrides, f"train.steps={saved + 10}"])
    assert again.code == 0, again.stderr
    assert f"resuming after step {saved} " in again.stdout
    assert "has no line of steps" not in again.stderr
    assert_whole(run, saved + 10)


def test_a_result_that_finds_no_room_leaves_the_run_unfinished(
    tiny_config: Path, disk: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["train.steps=4", "checkpoint.interval=2", f"run.root={disk}", "run.name=result"]
    config = load_config(tiny_config, [*overrides, "train.eval_interval=null", "train.sample_prompts=[def]"])

    def write(*arguments: Any) -> None:
        with filled(disk):
            write_json(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "write_json", write)
        with pytest.raises(store.UnsavedError, match=r"result\.json could not be written \(.*No space left on device"):
            train(config, open_inputs(config, world), world, StopRequest())
    assert not (config.run.folder / "result.json").exists()
    assert train(config, open_inputs(config, world), world, StopRequest())
    assert (config.run.folder / "result.json").exists()
    assert "def" in (config.run.folder / "samples.txt").read_text()
    assert_whole(Run(config.run.folder), 4)


@pytest.mark.parametrize("tensorboard", [False, True])
def test_every_line_is_whole_at_every_moment(disk: Path, tensorboard: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that find no room wait, and leave no part of theirs in the file."""
    log = MetricsLog(disk, 0, 1000, board(disk) if tensorboard else no_trackers)
    fill(disk)
    for step in range(1, 201):  # more than the rest of a block
        log.write(step_line(step))
    kept = read(disk)
    assert kept == [step_line(step) for step in range(1, len(kept) + 1)]
    assert len(kept) < 200
    free(disk)
    log.write(step_line(201))
    assert read(disk) == [step_line(step) for step in range(1, 202)]
    fill(disk)
    for step in range(202, 401):
        log.write(step_line(step))
    log.close()
    told = capsys.readouterr().err
    assert told.count("metrics.jsonl cannot be written (") == 2
    assert "metrics.jsonl lacks its last " in told
    assert ("tensorboard: OSError: [Errno 28]" in told) == tensorboard
    free(disk)
    last = read(disk)[-1]["step"]
    MetricsLog(disk, 400, 1000).close()
    assert f"metrics.jsonl has no line of steps {last + 1} to 400" in capsys.readouterr().err


def test_a_tracker_gets_at_the_next_start_what_found_no_room(disk: Path) -> None:
    log = MetricsLog(disk, 0, 1000, board(disk))
    log.write(step_line(1))
    while not list(disk.glob("trackers/*.json")):  # it is open
        time.sleep(0.01)
    fill(disk)
    for step in range(2, 201):
        log.write(step_line(step))
    log._feeds[0]._thread.join()  # it has failed
    free(disk)
    log.close()
    MetricsLog(disk, 200, 1000, board(disk)).close()
    assert points(disk, "train/loss") == [(step, 5.0 - step) for step in range(1, 201)]
