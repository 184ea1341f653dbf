"""metrics.jsonl reads as if the run had never been interrupted."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.commands.cli import duration
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.metrics import MetricsLog, metrics_from_end
from plumbline.launcher.runtime.trackers.feed import Feed, History
from plumbline.launcher.runtime.trackers.kind import TrackedRun
from plumbline.launcher.runtime.trackers.tensorboard import TensorBoard

WORLD = World(rank=0, local_rank=0, size=2, device=torch.device("cpu"))


def step_line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": 10 * step,
        "loss": 5.0 - step,
        "lr": 0.1,
        "grad_norm": 1.0,
        "tokens_per_second": 7.0,
    }


def eval_line(step: int) -> dict[str, Any]:
    return {"step": step, "tokens": 10 * step, "eval/text/loss": 3.0}


def diagnostics_line(step: int) -> dict[str, Any]:
    values = {"stream/kurt/00": 1.5, "stream/kurt/01": 2.5, "attn/sink/00": 0.5, "logits/z": 4.0}
    return {"step": step, "tokens": 10 * step, **values}


def board(folder: Path) -> Callable[[History], list[Feed]]:
    run = TrackedRun(folder, "tests", {}, {})
    return lambda before: [Feed("tensorboard", TensorBoard, run, before)]


def no_trackers(before: History) -> list[Feed]:
    return []


def write(folder: Path, *records: dict[str, Any], step: int = 0, tensorboard: bool = False) -> None:
    log = MetricsLog(folder, step, 100, board(folder) if tensorboard else no_trackers)
    for record in records:
        log.write(record)
    log.close()


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


FOUR = [step_line(1), step_line(2), eval_line(2), step_line(3), step_line(4), eval_line(4)]


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 5), (5, 6)])
def test_what_came_after_the_checkpoint_is_dropped(tmp_path: Path, step: int, kept: int) -> None:
    """The evaluation at the step itself too: it comes after the checkpoint and is made again."""
    write(tmp_path, *FOUR)
    write(tmp_path, step=step)
    assert read(tmp_path) == FOUR[:kept]


@pytest.mark.parametrize(("step", "kept"), [(1, 1), (2, 3), (3, 5), (4, 7)])
def test_diagnostics_stay_with_their_step(tmp_path: Path, step: int, kept: int) -> None:
    """A step's diagnostics come before its checkpoint; its evaluation, even one of no corpus at all, after it."""
    nothing_held_out = {"step": 4, "tokens": 40}
    lines = [step_line(1), step_line(2), diagnostics_line(2), eval_line(2), step_line(3), diagnostics_line(4)]
    lines += [{**step_line(4), "skipped": True}, nothing_held_out]
    write(tmp_path, *lines)
    write(tmp_path, step=step)
    assert read(tmp_path) == lines[:kept]


def test_the_evaluation_of_a_last_step_stays_once_the_run_is_longer(tmp_path: Path) -> None:
    write(tmp_path, step_line(1), step_line(2), eval_line(2))
    MetricsLog(tmp_path, 2, 100, evaluates=False).close()
    assert read(tmp_path) == [step_line(1), step_line(2), eval_line(2)]
    MetricsLog(tmp_path, 2, 100, evaluates=True).close()
    assert read(tmp_path) == [step_line(1), step_line(2)]


def test_lines_that_were_set_further_apart_are_not_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At one in ten steps, five steps after the last line lack none; ten steps do."""
    write(tmp_path, step_line(10), step_line(20))
    MetricsLog(tmp_path, 25, 100, interval=1).close()
    assert "lost" not in capsys.readouterr().err
    MetricsLog(tmp_path, 30, 100, interval=1).close()
    assert "has no line of steps 21 to 30" in capsys.readouterr().err


@pytest.mark.parametrize("reads", [True, False])
def test_a_start_reads_what_it_drops_and_one_line_before(tmp_path: Path, reads: bool) -> None:
    """A long run goes on without reading all that it wrote; what it does read must be whole, and is named if not."""
    write(tmp_path, *FOUR)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines[2 if reads else 1] = "damaged"
    file.write_text("".join(f"{line}\n" for line in lines))
    if reads:
        with pytest.raises(DamagedFileError, match=r"metrics\.jsonl, line 3: not JSON"):
            write(tmp_path, step=3)
    else:
        write(tmp_path, step=3)
        assert file.read_text().splitlines() == lines[:4]


def test_a_later_step_that_somebody_put_among_earlier_ones_goes(tmp_path: Path) -> None:
    write(tmp_path, step_line(1), step_line(9), step_line(2), step_line(3))
    write(tmp_path, step=2)
    assert read(tmp_path) == [step_line(1), step_line(2)]


@pytest.mark.parametrize("damaged", [{"step": 3, "loss": "low"}, {"loss": 1.0}])
def test_a_value_of_another_kind_is_named_with_its_line(tmp_path: Path, damaged: dict[str, Any]) -> None:
    write(tmp_path, step_line(1), damaged)
    with pytest.raises(DamagedFileError, match=r"metrics\.jsonl, line 2: (loss|step) = "):
        MetricsLog(tmp_path, 3, 100)


def test_what_an_earlier_attempt_still_writes_to_is_another_file(tmp_path: Path) -> None:
    """Even where nothing is dropped."""
    write(tmp_path, step_line(1))
    with (tmp_path / "metrics.jsonl").open("a") as earlier:
        MetricsLog(tmp_path, 1, 100).close()
        earlier.write("a line of an attempt that is not dead")
    assert read(tmp_path) == [step_line(1)]


def test_the_last_lines_are_read_without_those_before(tmp_path: Path) -> None:
    """Who asks for the last step of a long run has no use for all of it."""
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f"{line}\n" for line in ("damaged", json.dumps(step_line(1)), json.dumps(eval_line(1)))))
    found = metrics_from_end(file)
    assert [next(found), next(found)] == [(1, eval_line(1)), (1, step_line(1))]
    with pytest.raises(DamagedFileError, match=r"metrics\.jsonl, line 1: not JSON"):
        next(found)


def test_every_line_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, 100)
    log.write(step_line(1))
    assert read(tmp_path) == [step_line(1)]
    log.close()


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "\0\0\0\0", "{"])
def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path: Path, torn: str) -> None:
    write(tmp_path, step_line(1), step_line(2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    write(tmp_path, step_line(3), step=2)
    assert read(tmp_path) == [step_line(1), step_line(2), step_line(3)]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    write(tmp_path, step_line(1), step_line(2))
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text().rstrip("\n"))
    write(tmp_path, step_line(3), step=2)
    assert read(tmp_path) == [step_line(1), step_line(2), step_line(3)]


def test_progress_prints_the_first_and_the_last_step_and_little_between(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path, 0, 100)
    for step in range(1, 101):
        log.progress({**step_line(step), "mfu": 0.25})
    log.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step   1/100  loss 4.0000  lr 1.00e-01  grad 1.00  7 tokens/s  mfu 25.0%  eta -:--")
    assert lines[-1].startswith("step 100/100  ")
    assert lines[-1].endswith("eta 0:00")
    assert len(lines) <= 5


def test_the_time_left_goes_by_the_work_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten small steps took ten seconds; ninety steps of eight times the work are left. The first took an hour."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for work, eta in ((lambda step: step + 7 * max(0, step - 11), "eta 11:52"), (lambda step: step, "eta 1:29")):
        log = MetricsLog(tmp_path, 0, 100, work_before=work)
        now += 3600.0
        log.progress(step_line(1))
        assert capsys.readouterr().out.strip().endswith("eta -:--")
        now += 10.0
        log.progress(step_line(11))
        log.close()
        assert capsys.readouterr().out.strip().endswith(eta)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.4, "0:59"), (61, "1:01"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def points(folder: Path, key: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(key)]


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    write(tmp_path, step_line(1), step_line(2), eval_line(2), tensorboard=True)
    assert points(tmp_path, "train/loss") == [(1, 4.0), (2, 3.0)]
    assert points(tmp_path, "train/tokens") == [(1, 10.0), (2, 20.0)]
    assert points(tmp_path, "eval/text/loss") == [(2, 3.0)]
    with pytest.raises(KeyError):
        points(tmp_path, "train/step")


def test_tensorboard_forgets_what_a_resumed_run_makes_again(tmp_path: Path) -> None:
    lines = [step_line(1), step_line(2), step_line(3), eval_line(3), step_line(4), step_line(5)]
    write(tmp_path, *lines, tensorboard=True)
    write(tmp_path, eval_line(3), {**step_line(4), "loss": 9.0}, step=3, tensorboard=True)
    assert points(tmp_path, "train/loss") == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 9.0)]
    assert points(tmp_path, "eval/text/loss") == [(3, 3.0)], "the evaluation at the step of the checkpoint comes twice"


def test_tensorboard_draws_a_quantity_of_all_blocks_together(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, 100, board(tmp_path))
    for step in (2, 4):
        log.write(diagnostics_line(step))
    log.close()
    assert read(tmp_path) == [diagnostics_line(2), diagnostics_line(4)]
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [event.value for event in accumulator.Scalars("stream/kurt/01")] == [2.5, 2.5]
    layout = layout_pb2.Layout.FromString(accumulator.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert charts == {"attn/sink": ["attn/sink/"], "stream/kurt": ["stream/kurt/"]}


def test_an_unknown_utilisation_is_said_to_be_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(tmp_path, 0, 1, board(tmp_path))
    record = {**step_line(1), "mfu": None}
    log.write(record)
    log.progress(record)
    log.close()
    assert read(tmp_path)[-1]["mfu"] is None
    assert "mfu unknown, peak too low" in capsys.readouterr().out
