"""`train.profile` says where the time of some steps goes, and changes none of their numbers."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.remarks import cautions
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train.loop import Trainer
from plumbline.launcher.runtime.train.profile import device_times
from plumbline.launcher.runtime.train.saving import Saver
from plumbline.launcher.runtime.train.train import train
from tests.conftest import Run

SHORT = ["train.steps=5", "train.eval_interval=null", "checkpoint.interval=null"]


def run(tiny_config: Path, root: Path, world: World, *overrides: str) -> Run:
    config = load_config(tiny_config, [*SHORT, f"run.root={root}", *overrides])
    assert train(config, open_inputs(config, world), world, StopRequest())
    return Run(config.run.folder)


def test_steps_are_traced(tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones, before they are saved and evaluated. On one rank a step has four micro-batches."""
    written: list[tuple[str, bool]] = []

    def watched(owner: type[Saver | Trainer], name: str) -> None:
        method = getattr(owner, name)

        def watch(*arguments: Any, **more: Any) -> Any:
            written.append((name, (tmp_path / "traced" / "tiny" / "profile" / "steps.txt").exists()))
            return method(*arguments, **more)

        monkeypatch.setattr(owner, name, watch)

    watched(Saver, "save")
    watched(Trainer, "_evaluate")
    traced = run(tiny_config, tmp_path / "traced", world, "train.profile={start: 4, steps: 2}")
    assert written == [("save", True), ("_evaluate", True)]
    with gzip.open(traced.folder / "profile" / "trace.json.gz", "rt", encoding="utf-8") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert {part: names.count(f"step: {part}") for part in ("data", "forward", "backward", "update")} == {
        "data": 2, "forward": 8, "backward": 8, "update": 2
    }  # fmt: skip
    rows = (traced.folder / "profile" / "steps.txt").read_text(encoding="utf-8").splitlines()
    found = {row[:48].strip(): [float(number) for number in row[48:].split()] for row in rows if row[-1:].isdigit()}
    assert found["forward"][2] == 4
    assert 0 < found["update"][0] < found["forward"][0] + found["backward"][0]
    assert any("mm" in name for name in found), "matrix products are among what takes longest"

    plain = run(tiny_config, tmp_path / "plain", world)
    assert traced.column("loss") == plain.column("loss")
    assert not (plain.folder / "profile").exists()


def test_a_run_that_ends_amid_the_steps_to_trace_is_complete(
    tiny_config: Path, tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    ended = run(tiny_config, tmp_path, world, "train.profile={start: 4, steps: 9}")
    assert not (ended.folder / "profile").exists()
    assert "train.profile: nothing is written: training ended, or went back, before step 12 was made" in caplog.text
    config = load_config(tiny_config, [*SHORT, "train.profile={start: 4, steps: 2}"])
    longer = load_config(tiny_config, [*SHORT, "train.profile={start: 4, steps: 3}"])
    (told,) = set(cautions(longer, plan_run(longer))) - set(cautions(config, plan_run(config)))
    assert told.startswith("train.profile: step 6 is to be the last that is traced, and the run has 5")


def test_a_trace_that_cannot_be_written_is_a_warning(
    tiny_config: Path, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    place = load_config(tiny_config, [f"run.root={tmp_path}"]).run.folder / "profile"
    place.parent.mkdir(parents=True)
    place.write_text("a file")
    run(tiny_config, tmp_path, world, "train.profile={start: 2, steps: 1}")
    assert "the steps of train.profile were traced, and not written: " in capsys.readouterr().err


def test_a_gpus_time_counts_for_the_part_that_called_it_from_whichever_thread() -> None:
    """No GPU is needed to add up what torch says of one: here the backward pass calls from a thread of its own."""

    def event(name: str, start: float, end: float, *durations: float) -> SimpleNamespace:
        kernels = [SimpleNamespace(duration=duration) for duration in durations]
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, kernels=kernels, device_type=DeviceType.CPU)

    events = [
        event("step: forward", 0, 10),
        event("aten::mm", 1, 2, 7.0, 0.5),
        event("step: backward", 10, 20),
        event("CompiledFunctionBackward", 11, 19, 30.0),
        event("step: forward", 20, 30),
        event("aten::mm", 29, 31, 8.0),
        event("aten::mm", 40, 41, 100.0),
    ]
    assert device_times(events) == {"step: forward": 15.5, "step: backward": 30.0}
