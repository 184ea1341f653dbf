"""A checkpoint is read back under a watch, and what cannot be read is neither damage nor the end of a run."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.checkpoint import resume, store
from plumbline.launcher.runtime.checkpoint.saved_tensors import SavedTensors
from plumbline.launcher.runtime.checkpoint.store import UnreadError
from plumbline.launcher.runtime.config.load import load_config, save_config
from tests.distributed.conftest import save, state_after

if TYPE_CHECKING:
    from pathlib import Path

    from plumbline.launcher.runtime.config.schema import Config
    from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
    from plumbline.launcher.runtime.ranks.world import World
    from plumbline.launcher.runtime.run.inputs import Inputs


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, [])


@pytest.fixture(scope="module")
def root(
    engine: DeepSpeedEngine, config: Config, inputs: Inputs, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the folder of two checkpoints."""
    folder = tmp_path_factory.mktemp("reading") / "checkpoints"
    for step in (1, 2):
        save(engine, config, state_after(step, inputs), folder, world)
    return folder


def refuse(*_arguments: Any, **_options: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_whoever_watches_is_told_of_each_part(
    root: Path, engine: DeepSpeedEngine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BLOCK", 2**14)
    told: list[None] = []
    found = resume.find(root, world, heartbeat=lambda: told.append(None))
    assert found == root / "step_00000002"
    size = sum(file.stat().st_size for file in found.rglob("*") if file.name != store.MANIFEST)
    assert len(told) >= size / 2**14 > 10
    told.clear()
    resume.load(engine, found, lambda: told.append(None))
    assert len(told) == len(engine.pieces())


@pytest.mark.parametrize(("of", "name"), [(store, "_checksum"), (store, "read_object")])
def test_what_cannot_be_read_is_not_passed_over(
    root: Path, world: World, monkeypatch: pytest.MonkeyPatch, of: Any, name: str
) -> None:
    monkeypatch.setattr(of, name, refuse)
    with pytest.raises(
        UnreadError, match=r"step_00000002.* could not .*Input/output error.* start the same command again"
    ):
        resume.find(root, world)


def test_nor_when_it_is_loaded(root: Path, engine: DeepSpeedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavedTensors, "read", refuse)
    with pytest.raises(UnreadError, match=r"step_00000002 could not be read \(.*Input/output error"):
        resume.load(engine, root / "step_00000002")


@pytest.mark.parametrize(("override", "warns"), [("data.micro_batch_size=4", True), ("optimizer.lr=0.001", False)])
def test_who_resumes_with_another_micro_batch_hears_that_other_text_is_scored(
    root: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str], override: str, warns: bool
) -> None:
    resume.tell_changes(root / "step_00000002", load_config(tiny_config, [override]))
    assert ("counts micro-batches" in capsys.readouterr().err) == warns
    resume.tell_changes(root / "step_00000002", load_config(tiny_config, [override, "train.eval_batches=null"]))
    assert "counts micro-batches" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step", "overrides", "warning"),
    [
        (20, ["train.steps=40"], "from 0.001 in step 20 to 0.004 in step 21"),
        (19, ["train.steps=40"], "from 0.002 in step 19 to 0.004 in step 20"),
        (18, ["train.steps=40"], None),
        (10, ["train.steps=40"], None),
        (10, ["optimizer.lr=0.008"], "from 0.004 in step 10 to 0.008 in step 11"),
        (10, ["optimizer.lr=0.005"], None),
        (10, ["optimizer.lr=0.001"], None),
        (20, ["schedule.final_lr_fraction=0.1"], None),
        (1, [], None),
    ],
)
def test_who_resumes_at_a_higher_rate_hears_of_it(
    tmp_path: Path,
    tiny_config: Path,
    capsys: pytest.CaptureFixture[str],
    step: int,
    overrides: list[str],
    warning: str | None,
) -> None:
    """The run has a warm-up of 2 steps and a decay to 0 over the last 4 of 20."""
    folder = tmp_path / f"step_{step:08}"
    folder.mkdir()
    save_config(load_config(tiny_config, []), folder / "config.yaml")
    resume.tell_changes(folder, load_config(tiny_config, overrides))
    said = capsys.readouterr().err
    assert ("the learning rate goes up" in said) == (warning is not None)
    assert warning is None or warning in said
