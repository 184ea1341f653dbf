"""What a rank keeps on its node: whose it is, what damage does to it, and what becomes of it, on one rank."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.launcher.runtime.checkpoint import local, publishing, resume, store
from plumbline.launcher.runtime.checkpoint.commit import Pace
from plumbline.launcher.runtime.checkpoint.local import MARKER, LocalCheckpoints
from plumbline.launcher.runtime.checkpoint.snapshot import take_snapshot
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs, open_inputs
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train import loop
from plumbline.launcher.runtime.train.train import train
from tests.conftest import Run
from tests.distributed.conftest import save, state_after
from tests.distributed.test_checkpoint import KINDS, flip

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 60.0  # seconds; reached only by what hangs


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, ["train.ema_half_life_tokens=512"])


def placed(config: Config, folder: Path) -> Config:
    """Return the configuration of a run under `folder`, whose node's storage is there as well."""
    run = config.run.model_copy(update={"root": str(folder / "runs")})
    nearby = {"path": str(folder / "node"), "interval": 1}
    settings = type(config.checkpoint).model_validate({"interval": 50, "keep_last": 9, "local": nearby})
    return config.model_copy(update={"run": run, "checkpoint": settings})


@pytest.fixture
def here(config: Config, tmp_path: Path) -> Config:
    return placed(config, tmp_path)


@pytest.fixture
def nearby(here: Config, world: World) -> LocalCheckpoints:
    return LocalCheckpoints(here, world)


@pytest.fixture
def keep(engine: DeepSpeedEngine, inputs: Inputs) -> Callable[[LocalCheckpoints, int], Path]:
    def write(nearby: LocalCheckpoints, step: int) -> Path:
        snapshot = take_snapshot(engine, state_after(step, inputs), locally=True)
        return nearby.save(snapshot, None, Pace())

    return write


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_damage_of_a_part_is_noticed_and_the_run_folder_counts(
    keep: Callable[[LocalCheckpoints, int], Path],
    nearby: LocalCheckpoints,
    here: Config,
    engine: DeepSpeedEngine,
    inputs: Inputs,
    world: World,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    damage: str,
) -> None:
    root = here.run.folder / "checkpoints"
    shared = save(engine, here, state_after(1, inputs), root, world)
    part = keep(nearby, 2)
    assert resume.find(root, world, nearby) == part
    file = part / KINDS[kind]
    if damage == "flip":
        flip(file, file.stat().st_size // 2)
    elif damage == "truncate":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()
    assert resume.find(root, world, nearby) == shared
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"{part} cannot be used and is passed over: rank 0 on " in warning
    assert KINDS[kind] in warning


def test_the_newer_of_both_tiers_counts_and_the_rest_goes(
    keep: Callable[[LocalCheckpoints, int], Path],
    nearby: LocalCheckpoints,
    here: Config,
    engine: DeepSpeedEngine,
    inputs: Inputs,
    world: World,
) -> None:
    root = here.run.folder / "checkpoints"
    save(engine, here, state_after(1, inputs), root, world)
    keep(nearby, 1)
    part = keep(nearby, 2)
    assert [path.name for path in nearby.folder.iterdir() if path.is_dir()] == [part.name]
    shared = save(engine, here, state_after(2, inputs), root, world)
    assert resume.find(root, world, nearby) == shared, "of the same step, the one that does not depend on nodes"
    assert resume.load(engine, part) == state_after(2, inputs)
    shutil.rmtree(shared)
    assert resume.find(root, world, nearby) == part
    (nearby.folder / ".step_00000003.0123abcd.staging").mkdir()
    (nearby.folder.with_name("rank_00007")).mkdir()
    (nearby.folder.parents[1] / f".{nearby.folder.parent.name}.0123abcd.staging").mkdir()
    nearby.tidy(part)
    assert [path.name for path in nearby.folder.parents[1].iterdir()] == [nearby.folder.parent.name]
    assert [path.name for path in nearby.folder.parent.iterdir() if path.is_dir()] == [nearby.folder.name]
    assert [path.name for path in nearby.folder.iterdir() if path.is_dir()] == [part.name]
    nearby.tidy(root / "step_00000001")
    assert [path.name for path in nearby.folder.iterdir() if path.is_dir()] == []


def test_a_nodes_disk_that_breaks_leaves_the_run_folder_to_go_on_from(
    keep: Callable[[LocalCheckpoints, int], Path],
    nearby: LocalCheckpoints,
    here: Config,
    engine: DeepSpeedEngine,
    inputs: Inputs,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one rank of many, which would otherwise end alone, and leave the others waiting for it."""
    root = here.run.folder / "checkpoints"
    shared = save(engine, here, state_after(1, inputs), root, world)
    keep(nearby, 2)

    def broken(entry: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *more: Any, **named: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(nearby.folder):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return entry(path, *more, **named)

        return call

    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, broken(getattr(os, name)))
        assert resume.find(root, world, nearby) == shared
        nearby.tidy(shared)
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "checkpoints", broken(store.checkpoints))
        assert store.problems(keep(nearby, 3)) == []


@pytest.mark.parametrize(("own", "kept"), [(0, [0, 2, 9]), (2, [0, 1, 2, 5, 9])])
def test_what_ranks_left_that_are_on_other_nodes_now_goes(
    keep: Callable[[LocalCheckpoints, int], Path],
    nearby: LocalCheckpoints,
    here: Config,
    monkeypatch: pytest.MonkeyPatch,
    own: int,
    kept: list[int],
) -> None:
    """Slurm numbers ranks by the names of nodes: where one is replaced, those behind it move. The lowest one tidies."""
    keep(nearby, 2)
    for rank in (1, 2, 5, 9):
        nearby.folder.with_name(f"rank_{rank:05d}").mkdir()
    foreign = nearby.folder.with_name("rank_x")
    foreign.mkdir()
    hosts = ["n1", "n2", "n1", *["n3"] * 6, "n1"]
    monkeypatch.setattr(local, "gather_objects", lambda _value, _world: hosts)
    monkeypatch.setattr(local, "from_main", lambda action, _world: action())
    LocalCheckpoints(here, World(own, 0, len(hosts), torch.device("cpu"))).tidy(None)
    foreign.rmdir()  # of somebody else: it stays, and stops nothing
    assert sorted(int(folder.name[5:]) for folder in nearby.folder.parent.glob("rank_*")) == kept


def test_a_change_of_what_is_trained_leaves_it_aside(
    keep: Callable[[LocalCheckpoints, int], Path],
    nearby: LocalCheckpoints,
    here: Config,
    world: World,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another rate, and the course of before would be mixed with the one that comes."""
    keep(nearby, 2)
    other = here.model_copy(update={"optimizer": here.optimizer.model_copy(update={"lr": 0.5})})
    assert resume.find(here.run.folder / "checkpoints", world, LocalCheckpoints(other, world)) is None
    assert "optimizer.lr: 0.004 -> 0.5" in capsys.readouterr().err


def test_a_run_that_is_begun_anew_does_not_go_on_from_that_of_before(
    keep: Callable[[LocalCheckpoints, int], Path], nearby: LocalCheckpoints, here: Config, world: World
) -> None:
    part = keep(nearby, 2)
    root = here.run.folder / "checkpoints"
    assert resume.find(root, world, LocalCheckpoints(here, world)) == part
    shutil.rmtree(root)
    anew = LocalCheckpoints(here, world)
    assert resume.find(root, world, anew) is None
    anew.tidy(None)
    anew.clear()
    assert part.is_dir(), "it is not this run's to delete"


@pytest.mark.parametrize("marker", [None, '{"run": "/elsewhere/tiny", "id": "1"}\n'])
def test_what_is_not_ours_is_neither_read_nor_touched(
    keep: Callable[[LocalCheckpoints, int], Path],
    nearby: LocalCheckpoints,
    here: Config,
    world: World,
    tmp_path: Path,
    marker: str | None,
) -> None:
    home = keep(nearby, 2).parents[1]
    (home / MARKER).unlink()
    if marker is not None:
        (home / MARKER).write_text(marker)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "node").rglob("*")}
    assert resume.find(here.run.folder / "checkpoints", world, nearby) is None
    with pytest.raises(store.CheckpointError, match=r"rank 0 on \S+: FileExistsError: .* is not of this run: move it"):
        keep(nearby, 3)
    nearby.tidy(None)
    nearby.clear()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "node").rglob("*")} == before


@pytest.mark.parametrize("planted", ["home", "own rank", "other rank", "another user's home"])
def test_nothing_is_read_or_deleted_through_what_another_user_may_have_put_there(
    keep: Callable[[LocalCheckpoints, int], Path],
    nearby: LocalCheckpoints,
    tmp_path: Path,
    planted: str,
) -> None:
    """In /dev/shm anybody can make a folder of the run's name, with the right run.json, and links to our folders."""
    home = keep(nearby, 2).parents[1]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (home, nearby.folder)} == {0o700}
    precious = tmp_path / "precious"
    link = {"home": home, "own rank": nearby.folder, "other rank": home / "rank_00007"}.get(planted)
    if link is None:
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(home, 12345, 12345)
        precious = home
    else:
        (nearby.folder if planted == "other rank" else link).rename(precious)
        link.symlink_to(precious)
    before = sorted(precious.rglob("*"))
    assert before
    assert nearby.candidates() == []
    assert nearby.damage(nearby.folder / "step_00000002", store.silent) == [f"{nearby._names[0]}: there is none"]
    nearby.tidy(None)
    assert sorted(precious.rglob("*")) == before
    if planted != "other rank":
        with pytest.raises(
            store.CheckpointError, match=r"is a link, or not a folder .* checkpoint\.local\.path, where"
        ):
            keep(nearby, 3)
        nearby.clear()
    assert sorted(precious.rglob("*")) == before


def test_a_place_that_cannot_be_written_is_a_warning_that_counts_for_nothing(
    here: Config, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node").write_text("a file")
    section = here.train.model_copy(update={"steps": 4, "eval_interval": None})
    checkpoint = here.checkpoint.model_copy(update={"max_failures": 1, "interval": 3})
    config = here.model_copy(update={"train": section, "checkpoint": checkpoint})
    assert train(config, open_inputs(config, world), world, StopRequest())
    error = capsys.readouterr().err
    assert "warning: step 1: " in error
    assert "Training goes on, the next save tries again" in error
    assert "warning: step 3: " not in error, "that one goes to the run folder"
    assert [name for name in Run(config.run.folder).checkpoints if name.startswith("step_")] == [
        "step_00000003", "step_00000004"
    ]  # fmt: skip


def test_training_does_not_wait_for_the_run_folder_in_order_to_save_locally(
    here: Config, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk of the run folder is let go only two steps later."""
    let_go = threading.Event()

    def publish(*arguments: Any) -> Path:
        assert let_go.wait(PATIENCE)
        return publishing.publish(*arguments)

    def advance(trainer: loop.Trainer, *made: Any) -> None:
        step_forward(trainer, *made)
        if trainer.state.step == 5:
            let_go.set()

    step_forward = loop.Trainer._advance
    monkeypatch.setattr("plumbline.launcher.runtime.checkpoint.commit.publish", publish)
    monkeypatch.setattr(loop.Trainer, "_advance", advance)
    section = here.train.model_copy(update={"steps": 6, "eval_interval": None})
    checkpoint = here.checkpoint.model_copy(update={"interval": 3})
    config = here.model_copy(update={"train": section, "checkpoint": checkpoint})
    assert train(config, open_inputs(config, world), world, StopRequest())
    assert "step 4: not saved locally, another checkpoint is still being written" in capsys.readouterr().out
