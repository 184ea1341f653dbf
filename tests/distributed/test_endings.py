"""A run is complete when its last step is made, scored and saved, and broken or unfinished otherwise."""

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from plumbline.launcher.runtime.checkpoint import commit, publishing
from plumbline.launcher.runtime.checkpoint.store import CheckpointError, UnsavedError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train import loop, saving
from plumbline.launcher.runtime.train.guards.guard import TrainingError
from plumbline.launcher.runtime.train.guards.non_finite import NonFinite
from plumbline.launcher.runtime.train.train import train
from tests.conftest import Run

SHORT = ["train.steps=6", "train.eval_interval=null", "checkpoint.interval=2", "metrics.diagnostics_interval=null"]


def configure(tiny_config: Path, root: Path, *overrides: str) -> Config:
    return load_config(tiny_config, [*SHORT, f"run.root={root}", *overrides])


def attempt(config: Config, world: World) -> bool:
    return train(config, open_inputs(config, world), world, StopRequest())


@pytest.mark.parametrize(
    ("overrides", "message", "saved"),
    [
        (
            ["train.steps=1", "optimizer.lr=1.0e19"],
            r"step 1: eval/email/loss is (nan|inf): .*remove it",
            ["step_00000001"],
        ),
        (["train.steps=3", "optimizer.lr=1.0e30"], r"step 3: the gradient norm is .* 2 update\(s\) in a row", []),
        (["train.steps=1", "optimizer.lr=1.0e39"], r"step 1: .* hold weights that are not finite", []),
    ],
)
def test_a_run_that_ends_broken_is_not_complete(
    tiny_config: Path, tmp_path: Path, world: World, overrides: list[str], message: str, saved: list[str]
) -> None:
    config = configure(tiny_config, tmp_path, "schedule.warmup=0steps", "checkpoint.interval=null", *overrides)
    with pytest.raises(TrainingError, match=message):
        attempt(config, world)
    run = Run(config.run.folder)
    assert not (run.folder / "result.json").exists()
    assert [name for name in run.checkpoints if name != "latest"] == saved


@pytest.mark.parametrize("rate", [30.0, 4.0e-3])
def test_a_run_that_ends_above_guessing_is_told_so_once(
    tiny_config: Path, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str], rate: float
) -> None:
    config = configure(tiny_config, tmp_path, "schedule.warmup=0steps", "train.log_interval=4", f"optimizer.lr={rate}")
    assert attempt(config, world)
    assert capsys.readouterr().err.count("is above that of guessing (ln(vocab_size) = ") == (rate == 30.0)


def block_save(monkeypatch: pytest.MonkeyPatch, step: int, times: int = 99) -> None:
    """Let the save of `step` find no place for its staging folder, so many times."""
    left = [OSError("no place")] * times

    def make_room(staging: Path) -> None:
        if staging.name.startswith(f".step_{step:08d}.") and left:
            raise left.pop()
        publishing.make_room(staging)

    monkeypatch.setattr(commit, "make_room", make_room)


def test_a_failed_save_is_a_warning_until_the_next(
    tiny_config: Path,
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = configure(tiny_config, tmp_path, "checkpoint.keep_last=9")
    block_save(monkeypatch, 2)
    assert attempt(config, world)
    assert "warning: step 2: " in capsys.readouterr().err
    run = Run(config.run.folder)
    assert [name for name in run.checkpoints if name.startswith("step_")] == ["step_00000004", "step_00000006"]
    assert list(run.column("loss")) == [1, 2, 3, 4, 5, 6]
    assert (run.folder / "result.json").exists()


def test_too_many_failed_saves_in_a_row_end_training(
    tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_room(staging: Path) -> None:
        raise OSError(f"no place for {staging.name}")

    monkeypatch.setattr(commit, "make_room", make_room)
    config = configure(tiny_config, tmp_path, "train.steps=60", "checkpoint.max_failures=3")
    with pytest.raises(UnsavedError, match=r"start the same command again; 3 checkpoints in a row were not written"):
        attempt(config, world)
    assert max(Run(config.run.folder).column("loss")) in (6, 8), "the third is of step 6, and known at the next save"


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_checkpoint_that_was_being_written_when_training_broke_down_is_there(
    tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, background: str
) -> None:
    """A guard stops the run while the last checkpoint waits for a slow disk."""
    broken = threading.Event()

    def publish(*arguments: Any) -> Path:
        if background == "true":
            assert broken.wait(60)
            time.sleep(1.0)  # while the run ends, unless it waits
        return publishing.publish(*arguments)

    def after_step(_guard: object, step: int, _result: object) -> None:
        if step == 3:
            broken.set()
            raise TrainingError("broken")

    monkeypatch.setattr(commit, "publish", publish)
    monkeypatch.setattr(NonFinite, "after_step", after_step)
    config = configure(tiny_config, tmp_path, f"checkpoint.background={background}")
    with pytest.raises(TrainingError, match="broken"):
        attempt(config, world)
    assert "step_00000002" in Run(config.run.folder).checkpoints


def test_a_run_whose_last_save_failed_is_not_complete(
    tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tiny_config, tmp_path)
    block_save(monkeypatch, 6)
    monkeypatch.setattr(saving, "PAUSES", (0.0, 0.0))
    with pytest.raises(UnsavedError, match=r"checkpoint not written .* start the same command again"):
        attempt(config, world)
    assert not (config.run.folder / "result.json").exists()
    monkeypatch.undo()
    assert attempt(config, world), "it goes on from step 4"
    assert list(Run(config.run.folder).column("loss")) == [1, 2, 3, 4, 5, 6]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_in_silence(
    tiny_config: Path, tmp_path: Path, world: World
) -> None:
    config = configure(tiny_config, tmp_path)
    assert attempt(config, world)
    metrics = (config.run.folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(config.run.folder / "checkpoints")
    longer = configure(tiny_config, tmp_path, "train.steps=8")
    with pytest.raises(CheckpointError, match=r"that of step 6, and all others, are gone: put it back; to start"):
        attempt(longer, world)
    assert (config.run.folder / "metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(config.run.folder)
    assert attempt(longer, world)


def test_a_run_that_saved_nothing_is_not_overwritten_by_another(
    tiny_config: Path,
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = configure(tiny_config, tmp_path, "checkpoint.interval=null")
    block_save(monkeypatch, 6)
    monkeypatch.setattr(saving, "PAUSES", (0.0, 0.0))
    with pytest.raises(UnsavedError):
        attempt(config, world)
    monkeypatch.undo()
    metrics = (config.run.folder / "metrics.jsonl").read_bytes()
    other = configure(tiny_config, tmp_path, "checkpoint.interval=null", "run.seed=9")
    with pytest.raises(CheckpointError, match=r"(?s)has the record of a run of other values; .*\n  run.seed: 1 -> 9"):
        attempt(other, world)
    assert (config.run.folder / "metrics.jsonl").read_bytes() == metrics
    assert "are made again" not in capsys.readouterr().err
    assert attempt(config, world), "the same run begins again"
    assert "came to step 6 and saved no checkpoint there: all steps are made again" in capsys.readouterr().err


def test_samples_that_hang_are_given_up(
    tiny_config: Path,
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """When somebody asks for a stop; or after train.hang_minutes."""
    stop, free = StopRequest(), threading.Event()

    def hang(_config: Config) -> None:
        stop.ask("by a test")
        free.wait()

    monkeypatch.setattr(loop, "write_samples", hang)
    config = configure(tiny_config, tmp_path, "train.sample_prompts=[def]")
    assert train(config, open_inputs(config, world), world, stop)
    free.set()
    assert "the samples of train.sample_prompts were given up" in capsys.readouterr().err
    assert (config.run.folder / "result.json").exists()


def test_a_run_that_never_had_a_checkpoint_begins_anew(
    tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_step(_guard: object, step: int, _result: object) -> None:
        if step == 2:
            raise TrainingError("broken")

    config = configure(tiny_config, tmp_path, "checkpoint.interval=null")
    with monkeypatch.context() as patched:
        patched.setattr(NonFinite, "after_step", after_step)
        with pytest.raises(TrainingError, match="broken"):
            attempt(config, world)
    assert Run(config.run.folder).column("loss")
    assert attempt(config, world)


def test_a_last_save_that_fails_for_a_moment_is_tried_again(
    tiny_config: Path,
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    block_save(monkeypatch, 6, times=2)
    monkeypatch.setattr(saving, "PAUSES", (0.25, 0.5))
    config = configure(tiny_config, tmp_path)
    assert attempt(config, world)
    errors = capsys.readouterr().err
    assert [f"Trying again in {pause} s" in errors for pause in ("0.25", "0.5")] == [True, True]
    assert "step_00000006" in Run(config.run.folder).checkpoints
