"""Checkpoints behind training: it goes on while one is written, and learns how that ended."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.checkpoint import background, commit, publishing, resume, store
from plumbline.launcher.runtime.checkpoint.background import CheckpointWriter, SaveOutcome
from plumbline.launcher.runtime.checkpoint.snapshot import take_snapshot
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs, open_inputs
from plumbline.launcher.runtime.system.exit_codes import HUNG
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train import saving, watchdog
from plumbline.launcher.runtime.train.train import train
from plumbline.launcher.runtime.train.watchdog import Watchdog
from tests.distributed.conftest import state_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from plumbline.launcher.runtime.checkpoint.snapshot import Snapshot

PATIENCE = 60.0  # seconds; reached only by what hangs


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, ["checkpoint.keep_last=9"])


def unheard(_doing: str) -> None:
    """Be the heartbeat of a writer that nobody watches."""


class SlowDisk:
    """Let files be written only when the disk is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.free = threading.Semaphore(0), threading.Semaphore(0)
        monkeypatch.setattr(commit, "write_files", self._write_files)

    def _write_files(self, *arguments: Any) -> Any:
        self.asked.release()
        assert self.free.acquire(timeout=PATIENCE)
        return publishing.write_files(*arguments)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


@pytest.fixture
def writer(config: Config, world: World, tmp_path: Path) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(config, tmp_path / "checkpoints", world, None, unheard)
    yield made
    made.finish()
    made.close()


@pytest.fixture
def snapshot(engine: DeepSpeedEngine, inputs: Inputs) -> Callable[[int], Snapshot]:
    return lambda step: take_snapshot(engine, state_after(step, inputs), locally=False)


def test_training_goes_on_and_what_is_written_is_the_step_of_the_save(
    writer: CheckpointWriter,
    disk: SlowDisk,
    snapshot: Callable[[int], Snapshot],
    engine: DeepSpeedEngine,
    inputs: Inputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert writer.save(lambda: snapshot(1), wait=False) is None
    losses = [engine.train_step(inputs.train.micro_batches(step), step, 1e-3).result.loss.item() for step in (1, 2)]
    assert disk.asked.acquire(timeout=PATIENCE)
    assert store.checkpoints(tmp_path / "checkpoints") == [], "it is not there before it is whole"
    disk.free.release()
    assert writer.finish() == SaveOutcome(1, None)
    assert writer.finish() is None
    (folder,) = store.checkpoints(tmp_path / "checkpoints")
    assert store.problems(folder, contents=True) == []
    assert ", behind training, which waited " in capsys.readouterr().out
    assert resume.load(engine, folder) == state_after(1, inputs)
    assert [
        engine.train_step(inputs.train.micro_batches(step), step, 1e-3).result.loss.item() for step in (1, 2)
    ] == losses


def test_a_failure_is_told_at_once_and_known_at_the_next_save(
    writer: CheckpointWriter,
    snapshot: Callable[[int], Snapshot],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_arguments: Any) -> Any:
        raise OSError("disk on fire")

    with monkeypatch.context() as patched:
        patched.setattr(commit, "write_files", refuse)
        assert writer.save(lambda: snapshot(1), wait=False) is None
        ended = writer.finish()
    assert ended is not None
    assert "disk on fire" in str(ended.error)
    assert "warning: step 1: " in (told := capsys.readouterr().err)
    assert "Training goes on, the next save tries again" in told
    assert writer.save(lambda: snapshot(2), wait=True) == SaveOutcome(2, None)


def test_without_a_background_a_save_returns_when_it_is_written(
    tiny_config: Path, world: World, snapshot: Callable[[int], Snapshot], tmp_path: Path
) -> None:
    config = load_config(tiny_config, ["checkpoint.background=false"])
    writer = CheckpointWriter(config, tmp_path, world, None, unheard)
    assert writer.save(lambda: snapshot(1), wait=False) == SaveOutcome(1, None)
    assert len(store.checkpoints(tmp_path)) == 1
    writer.close()


def test_of_two_checkpoints_in_a_row_one_is_in_memory(
    tiny_config: Path, tmp_path: Path, world: World, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop waits for a slow disk before it copies again."""
    order: list[str] = []

    def take(*arguments: Any) -> Snapshot:
        order.append("copied")
        return take_snapshot(*arguments)

    def let_go() -> None:
        for _ in range(3):
            assert disk.asked.acquire(timeout=PATIENCE)
            time.sleep(1)  # in which a loop that does not wait makes its next step
            order.append("written")
            disk.free.release()

    monkeypatch.setattr(saving, "take_snapshot", take)
    threading.Thread(target=let_go, daemon=True).start()
    overrides = ["train.steps=3", "train.eval_interval=null", "checkpoint.interval=1", f"run.root={tmp_path}"]
    config = load_config(tiny_config, overrides)
    assert train(config, open_inputs(config, world), world, StopRequest())
    assert order == ["copied", "written"] * 3


def test_a_save_that_goes_on_is_no_hang(
    config: Config,
    world: World,
    snapshot: Callable[[int], Snapshot],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither while parts of files come to the disk, nor while others write."""
    told, heard = threading.Semaphore(0), []
    writer = CheckpointWriter(config, tmp_path, world, None, lambda _doing: told.release())

    def forget() -> None:
        while told.acquire(blocking=False):
            pass

    def write_files(files: Any, folder: Path, heartbeat: store.Heartbeat) -> Any:
        def move() -> None:
            forget()
            heartbeat()
            heard.append(told.acquire(timeout=PATIENCE))

        return publishing.write_files(files, folder, move)

    def gather(share: Any, *arguments: Any) -> Any:
        if isinstance(share, tuple):  # how an action of this rank has ended
            forget()
            heard.append(told.acquire(timeout=PATIENCE))
        return gather_objects(share, *arguments)

    monkeypatch.setattr(background, "LOOK", 0.01)
    monkeypatch.setattr(publishing, "SYNC_BYTES", 1)
    monkeypatch.setattr(commit, "write_files", write_files)
    monkeypatch.setattr(commit, "gather_objects", gather)
    assert writer.save(lambda: snapshot(1), wait=True) == SaveOutcome(1, None)
    writer.close()
    (folder,) = store.checkpoints(tmp_path)
    files = sum(file.is_file() for file in folder.rglob("*"))
    assert all(heard)
    agreements = 3  # a place, all files, the final name
    assert len(heard) > files + agreements, "a large file moves before its end"


def test_a_save_whose_disk_hangs_is_one(
    config: Config,
    world: World,
    disk: SlowDisk,
    snapshot: Callable[[int], Snapshot],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        disk.free.release()

    watching = Watchdog(tmp_path / "stacks", world, minutes=2 / 60, end=end)
    writer = CheckpointWriter(config, tmp_path, world, None, watching.beat)
    assert writer.save(lambda: snapshot(1), wait=True) == SaveOutcome(1, None)
    writer.close()
    assert codes == [HUNG]


def test_a_bug_in_the_thread_does_not_pass_for_the_checkpoint_before(
    writer: CheckpointWriter, snapshot: Callable[[int], Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> Any:
        raise KeyError("a bug")

    assert writer.save(lambda: snapshot(1), wait=True) == SaveOutcome(1, None)
    monkeypatch.setattr(threading, "excepthook", lambda _arguments: None)  # it prints the traceback
    with monkeypatch.context() as patched:
        patched.setattr(commit, "write_files", fail)
        with pytest.raises(AssertionError, match="the thread says how it ended"):
            writer.save(lambda: snapshot(2), wait=True)


def test_a_group_that_failed_is_made_anew(
    writer: CheckpointWriter,
    snapshot: Callable[[int], Snapshot],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As gloo's does for good once a rank was late."""
    groups: list[Any] = []

    def lose(_share: Any, _world: World, group: Any) -> Any:
        groups.append(group)
        raise RuntimeError("Application timeout\n(and a stack)")

    def gather(share: Any, world: World, group: Any) -> Any:
        groups.append(group)
        return gather_objects(share, world, group)

    with monkeypatch.context() as patched:
        patched.setattr(commit, "gather_objects", lose)
        assert writer.save(lambda: snapshot(1), wait=False) is None
        ended = writer.finish()
    assert ended is not None
    assert "ranks lost each other (Application timeout): if one writes for deepspeed.timeout" in str(ended.error)
    assert "Training goes on" in capsys.readouterr().err
    monkeypatch.setattr(commit, "gather_objects", gather)
    assert writer.save(lambda: snapshot(2), wait=True) == SaveOutcome(2, None)
    assert groups[0] is not groups[1]


def test_where_the_file_system_is_gone_the_error_is_one_all_the_same(
    writer: CheckpointWriter, snapshot: Callable[[int], Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any) -> Any:
        raise OSError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(commit, "write_files", refuse)
        patched.setattr(shutil, "disk_usage", refuse)
        ended = writer.save(lambda: snapshot(1), wait=True)
    assert ended is not None
    assert "(rank 0: OSError: no answer); how much is free there cannot be told" in str(ended.error)
