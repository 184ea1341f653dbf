"""Workers of a sweep: which cells they take, and what becomes of the others when one of them ends."""

import os
import signal
import time
from pathlib import Path

import pytest

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.run.status import RunStatus
from plumbline.launcher.runtime.sweep.cells import Cell
from plumbline.launcher.runtime.sweep.pool import places, run_all
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.signals import StopRequest


def cell_of(base: Path, root: Path, name: str, lr: float = 0.01) -> Cell:
    given = [f"run.name={name}", f"run.root={root}", f"optimizer.lr={lr}"]
    return Cell({"name": name}, load_config(base, given))


def leave_once(config: Config, inputs: Inputs, world: World, stop: StopRequest, status: RunStatus) -> bool:
    """Leave as a worker does that someone else asked to stop."""
    left = config.run.folder / "left"
    if left.exists():
        return True
    left.touch()
    return False


def test_a_cell_that_only_its_worker_was_asked_to_leave_is_taken_up_again(
    tiny_config: Path, tmp_path: Path, stop: StopRequest
) -> None:
    told: list[str] = []
    waiting = [cell_of(tiny_config, tmp_path, "cell")]
    run_all(waiting, places(1, tmp_path / "log"), leave_once, False, stop, lambda _cell, outcome: told.append(outcome))
    assert told == ["finished"]
    assert (tmp_path / "cell" / "left").exists()


def die_or_wait_for_a_warning(
    config: Config, inputs: Inputs, world: World, stop: StopRequest, status: RunStatus
) -> bool:
    """Die so that no worker starts in its place; with the other learning rate, go on until there is a warning of it."""
    root = Path(config.run.root)
    if config.optimizer.lr < 0.01:
        while not (root / "other begun").exists():
            time.sleep(0.1)
        (root / "log").rename(root / "log.old")
        (root / "log").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    (root / "other begun").touch()
    while not (root / "warned").exists():
        time.sleep(0.1)
    return True


def test_a_worker_that_cannot_start_again_leaves_the_others_at_their_cells(
    tiny_config: Path, tmp_path: Path, stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def warn(text: str) -> None:
        said.append(text)
        (tmp_path / "warned").touch()

    monkeypatch.setattr(LOG, "warning", warn)
    waiting = [cell_of(tiny_config, tmp_path, "dies", lr=0.001), cell_of(tiny_config, tmp_path, "lives")]
    told: dict[str, str] = {}

    def ended(cell: Cell, outcome: str) -> None:
        told[cell.signature] = outcome

    run_all(waiting, places(2, tmp_path / "log"), die_or_wait_for_a_warning, False, stop, ended)
    assert told == {"dies": "failed", "lives": "finished"}
    (warning,) = said
    assert warning.startswith(f"a worker ended before it could start (exit code 1): see {tmp_path / 'log'}; ")
    assert warning.endswith("the sweep goes on with 1 worker(s)")


def test_workers_that_never_start_end_the_sweep(tiny_config: Path, tmp_path: Path, stop: StopRequest) -> None:
    (tmp_path / "log").mkdir()
    waiting = [cell_of(tiny_config, tmp_path, "cell")]
    with pytest.raises(ValueError, match=r"a worker ended before it could start \(exit code 1\): see .*log"):
        run_all(waiting, places(1, tmp_path / "log"), leave_once, False, stop, lambda _cell, _outcome: None)


def test_a_worker_that_never_starts_leaves_the_cells_to_the_others(
    tiny_config: Path, tmp_path: Path, stop: StopRequest
) -> None:
    (tmp_path / "log").mkdir()
    broken, whole = *places(1, tmp_path / "log"), *places(1, tmp_path / "other")
    waiting = [cell_of(tiny_config, tmp_path, name) for name in ("first", "second")]
    told: list[str] = []
    run_all(waiting, [broken, whole], finish, False, stop, lambda _cell, outcome: told.append(outcome))
    assert told == ["finished"] * 2


def finish(config: Config, inputs: Inputs, world: World, stop: StopRequest, status: RunStatus) -> bool:
    """Finish at once."""
    return True


def fail_in_the_first(config: Config, inputs: Inputs, world: World, stop: StopRequest, status: RunStatus) -> bool:
    """Fail as on a GPU without memory, and write down the process of each cell."""
    (config.run.folder / "process").write_text(str(os.getpid()))
    if config.run.name == "first":
        raise RuntimeError("out of memory")
    return True


def test_a_cell_that_failed_leaves_nothing_to_the_next(tiny_config: Path, tmp_path: Path, stop: StopRequest) -> None:
    waiting = [cell_of(tiny_config, tmp_path, name) for name in ("first", "second", "third")]
    told: list[str] = []
    place = places(1, tmp_path / "log")
    run_all(waiting, place, fail_in_the_first, False, stop, lambda _cell, outcome: told.append(outcome))
    assert told == ["failed", "finished", "finished"]
    assert (tmp_path / "first" / "error.txt").read_text().startswith("RuntimeError: out of memory")
    first, second, third = ((tmp_path / cell.signature / "process").read_text() for cell in waiting)
    assert first != second == third
