"""Each tracker, by its own package and without a network: one tracked run for all attempts, every point once."""

import json
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.trackers import TRACKERS, TrackerName, check_trackers
from plumbline.launcher.runtime.trackers.kind import TrackedRun
from plumbline.launcher.runtime.trackers.mlflow import MLflow, permitted
from plumbline.launcher.runtime.trackers.tensorboard import TensorBoard
from tests.conftest import Pretrain, Run, once

Points = dict[str, list[tuple[int, float]]]  # of each key, step and value in the order in which they came
INSTALLED = [name for name, kind in TRACKERS.items() if kind.package is None or find_spec(kind.package) is not None]


def env(folder: Path) -> dict[str, str]:
    """Return an environment in which nothing leaves the machine."""
    own = {name: str(folder / "home") for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")}
    return {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"), **own}


@pytest.fixture(scope="module")
def tracked(run_pretrain: Pretrain, tiny_config: Path, shared_folder: Path) -> Run:
    """Train two ranks to step 14, then go on from step 10, one rank, to step 20 by another schedule."""

    def train(folder: Path) -> None:
        folder.mkdir()
        options = ["run.root=" + str(folder), "metrics.diagnostics_interval=5", "metrics.project=tests"]
        options += [f"metrics.trackers=[{','.join(INSTALLED)}]"]
        start = partial(run_pretrain, tiny_config, "tracked", env=env(folder))
        outcome = start([*options, "train.steps=14"], ranks=2)
        assert outcome.code == 0, outcome.stderr
        run = folder / "tracked"
        (run / "result.json").unlink()
        (run / "checkpoints" / "step_00000014" / "manifest.json").unlink()
        outcome = start([*options, "train.steps=20"])
        assert outcome.code == 0, outcome.stderr
        assert "resuming after step 10 from" in outcome.stdout
        assert "warning: " not in outcome.stderr.replace("warning: /", "")  # of the checkpoint that is damaged

    return Run(once(shared_folder / "trackers", train) / "tracked")


def of_tensorboard(run: Run) -> Iterator[tuple[str, Points]]:
    board = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    yield (
        "tracked",
        {key: [(event.step, event.value) for event in board.Scalars(key)] for key in board.Tags()["scalars"]},
    )


def of_wandb(run: Run) -> Iterator[tuple[str, Points]]:
    """Read the files of all attempts, as `wandb sync` takes them."""
    found: dict[str, Points] = {}
    for file in sorted(run.folder.glob("wandb/offline-run-*/*.wandb")):
        points = found.setdefault(file.stem, {})
        for record in wandb_records(file):
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for key in row:
                if key != "step" and not key.startswith("_"):
                    points.setdefault(key, []).append((row["step"], row[key]))
    yield from found.items()


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, which is a log in LevelDB's format behind 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        in_block = 32768 - place % 32768
        if in_block < 7:
            place += in_block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def of_mlflow(run: Run) -> Iterator[tuple[str, Points]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.folder.parent / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'tests'")
    for found in client.search_runs([experiment.experiment_id]):
        assert found.info.run_name == "tracked"
        assert found.info.status == "FINISHED"
        assert found.data.params["optimizer.lr"] == "0.004"
        assert found.data.params["train.steps"] == "14", "parameters are those of the first start"
        keys = found.data.metrics
        history = {key: client.get_metric_history(found.info.run_id, key) for key in keys}
        yield found.info.run_id, {key: [(point.step, point.value) for point in history[key]] for key in keys}


def of_trackio(run: Run) -> Iterator[tuple[str, Points]]:
    found: dict[str, Points] = {}
    with sqlite3.connect(run.folder.parent / "trackio" / "tests.db") as database:
        for name, step, metrics in database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"):
            for key, value in json.loads(metrics).items():
                found.setdefault(name, {}).setdefault(key, []).append((step, value))
    yield from found.items()


READERS: dict[str, Callable[[Run], Iterator[tuple[str, Points]]]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
}


@pytest.mark.parametrize("name", TRACKERS)
def test_all_attempts_are_one_tracked_run_with_every_point_once(tracked: Run, name: TrackerName) -> None:
    if name not in INSTALLED:
        pytest.skip(f"pip install -e '.[{name}]'")
    ((run_id, points),) = READERS[name](tracked)
    state = json.loads((tracked.folder / "trackers" / f"{name}.json").read_text())
    assert state["run_id"] in run_id
    assert state["complete"]
    for key, made in points.items():
        if key not in ("train/rank_skew", "train/slow_rank"):  # measured by the clock
            steps = [step for step, _ in made]
            assert steps == sorted(set(steps)), key
    assert [step for step, _ in points["train/loss"]] == list(range(1, 21))
    loss = "eval/email/loss" if "eval/email/loss" in points else next(key for key in points if key.startswith("eval/"))
    assert [step for step, _ in points[loss]] == ([10, 20] if TRACKERS[name].rewinds else [10, 14, 20])
    assert [step for step, _ in points["stream/rms/00"]] == [5, 10, 15, 20]

    logged = tracked.column("loss")
    again = set() if TRACKERS[name].rewinds else set(range(11, 15))  # these have what was sent first
    assert {step: pytest.approx(value) for step, value in points["train/loss"] if step not in again} == {
        step: value for step, value in logged.items() if step not in again
    }


def test_a_tracker_that_is_not_installed_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(
        ValueError, match=r"mlflow and trackio cannot be imported: pip install -e '\.\[mlflow,trackio\]'"
    ):
        check_trackers(["tensorboard", "mlflow", "trackio"])
    check_trackers(["tensorboard"])


@pytest.mark.skipif("wandb" not in INSTALLED, reason="pip install -e '.[wandb]'")
def test_nobody_logged_in_to_wandb_is_an_error_before_training(
    run_pretrain: Pretrain, tiny_config: Path, tmp_path: Path
) -> None:
    outcome = run_pretrain(
        tiny_config, "not_logged_in", ["metrics.trackers=[wandb]"], launcher="python", env={"HOME": str(tmp_path)}
    )
    assert outcome.code == 2
    (error,) = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    assert "nobody is logged in: run `wandb login`" in error
    assert not outcome.run.folder.exists()


def test_every_name_has_a_kind() -> None:
    assert list(TRACKERS) == list(get_args(TrackerName))


def test_a_name_that_is_none_is_refused_with_those_that_are(tiny_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.trackers\.0 = 'neptune': .*'tensorboard', 'wandb', 'mlflow'"):
        load_config(tiny_config, ["metrics.trackers=[neptune]"])


class Own(TensorBoard):
    """Be a tracker of somebody's own."""


def test_a_tracker_may_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, cast(TrackerName, "own_file"), Own)
    monkeypatch.setattr(Own, "package", None)
    check_trackers([cast(TrackerName, "own_file")])
    monkeypatch.setattr(Own, "package", "not_there")
    with pytest.raises(ValueError, match=r"not_there cannot be imported: pip install -e '\.\[not_there\]'"):
        check_trackers([cast(TrackerName, "own_file")])


def test_mlflow_does_not_show_the_password_of_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:p4ss@host/base?key=1")
    monkeypatch.setitem(sys.modules, "mlflow", Mock())
    assert MLflow(TrackedRun(tmp_path, "tests", {}, {}), "r1", 1).where == "run r1 at https://host/base"


def test_mlflow_gets_names_that_it_permits() -> None:
    """It refuses the others, and one that is refused keeps back all that come after it."""
    assert permitted("eval/c++ (new)/loss") == "eval/c__ _new_/loss"
    assert permitted("eval/Bücher-2.1/bits_per_byte") == "eval/Bücher-2.1/bits_per_byte"
