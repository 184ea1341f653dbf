"""A run that was interrupted, by request or by force, ends with the numbers of one that was not, to the last bit."""

from __future__ import annotations

import functools
import json
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from plumbline.launcher.runtime.checkpoint.tensors import shard_name
from plumbline.launcher.runtime.run.status_file import read_attempts, read_status
from plumbline.launcher.runtime.system.exit_codes import INTERRUPTED, REQUEUE
from tests.conftest import PATIENCE, written

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Pretrain, Run, Start

STEPS, INTERVAL = 18, 3
LONG = [
    f"train.steps={STEPS}",
    f"checkpoint.interval={INTERVAL}",
    "train.eval_interval=9",
    "train.ema_half_life_tokens=2000",
    "metrics.diagnostics_interval=6",  # some fall on a checkpoint that a resume starts from
]
# Dropout makes every step depend on the random numbers, as random anchors do; bf16 makes the fp32 master weights matter
SETTINGS = {
    "zero1_bf16_dropout": [*LONG, "deepspeed.precision=bf16", "model.dropout=0.1"],
    "zero3_lookahead": [
        *LONG,
        "deepspeed.zero_stage=3",
        "objective.name=latent_lookahead",
        "objective.anchors=2",
        "objective.horizon=2",
    ],
}


def assert_same_numbers(found: Run, expected: Run) -> None:
    assert found.numbers == expected.numbers
    assert list(found.column("loss")) == list(range(1, STEPS + 1))
    assert list(found.column("eval/email/loss")) == [9, 18]
    assert list(found.column("stream/kurt/01")) == [6, 12, 18]
    results = [json.loads((run.folder / "result.json").read_text()) for run in (found, expected)]
    assert results[0] == results[1]
    last = f"checkpoints/step_{STEPS:08d}"
    for file in (shard_name(rank) for rank in (0, 1)):
        assert (found.folder / last / file).read_bytes() == (expected.folder / last / file).read_bytes()
    assert list(found.column("eval/email/ema_loss")) == [9, 18]


@pytest.fixture(scope="module")
def whole(run_pretrain: Pretrain, tiny_config: Path) -> Callable[[str], Run]:
    """Train a setting when it is first asked for, uninterrupted."""

    @functools.cache
    def run(name: str) -> Run:
        outcome = run_pretrain(tiny_config, f"whole_{name}", SETTINGS[name], ranks=2)
        assert outcome.code == 0, outcome.stderr
        return outcome.run

    return run


@pytest.mark.parametrize("name", list(SETTINGS))
def test_stopped_and_resumed_equals_uninterrupted(
    whole: Callable[[str], Run], start_pretrain: Start, run_pretrain: Pretrain, tiny_config: Path, name: str
) -> None:
    """SIGTERM to one rank alone, at a step that is not a multiple of anything, with luck."""
    overrides = SETTINGS[name]
    job = start_pretrain(tiny_config, f"stopped_{name}", overrides, ranks=2)
    job.wait_until(lambda: len(job.run.column("loss")) >= 5)
    job.processes[1].send_signal(signal.SIGTERM)
    outcome = job.wait()
    assert outcome.code == REQUEUE, outcome.stderr
    assert "the same command resumes" in outcome.stdout
    stopped_at = max(job.run.column("loss"))
    assert 5 <= stopped_at < STEPS, "the ranks agreed on a step"
    assert f"step_{stopped_at:08d}" in job.run.checkpoints
    assert not (job.run.folder / "result.json").exists()

    outcome = run_pretrain(tiny_config, f"stopped_{name}", overrides, ranks=2)
    assert outcome.code == 0, outcome.stderr
    assert f"resuming after step {stopped_at} from" in outcome.stdout
    assert_same_numbers(outcome.run, whole(name))


def test_killed_and_resumed_equals_uninterrupted(
    whole: Callable[[str], Run], start_pretrain: Start, run_pretrain: Pretrain, tiny_config: Path
) -> None:
    """SIGKILL to both ranks: steps after the last checkpoint are made, and logged, again."""
    name = "zero1_bf16_dropout"
    job = start_pretrain(tiny_config, "killed", SETTINGS[name], ranks=2)
    saved_twice = f"step_{2 * INTERVAL:08d}"  # behind training, so perhaps some steps later
    job.wait_until(
        lambda: saved_twice in job.run.checkpoints and max(job.run.column("loss"), default=0) >= 2 * INTERVAL + 2
    )
    job.kill()
    with (job.run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # a line that the kill cut short
    saved = [int(folder[5:]) for folder in job.run.checkpoints if folder.startswith("step_")]
    assert max(saved) >= 2 * INTERVAL

    outcome = run_pretrain(tiny_config, "killed", SETTINGS[name], ranks=2)
    assert outcome.code == 0, outcome.stderr
    assert f"resuming after step {max(saved)} from" in outcome.stdout
    assert_same_numbers(outcome.run, whole(name))


def test_a_complete_run_is_left_alone(whole: Callable[[str], Run], run_pretrain: Pretrain, tiny_config: Path) -> None:
    run = whole("zero1_bf16_dropout")
    before = written(run.folder)
    outcome = run_pretrain(tiny_config, "whole_zero1_bf16_dropout", SETTINGS["zero1_bf16_dropout"], ranks=2)
    assert outcome.code == 0
    assert outcome.stdout.count("is complete: step 18, nothing to do") == 1
    other = [*SETTINGS["zero1_bf16_dropout"], "optimizer.lr=0.123", "checkpoint.keep_last=7"]
    outcome = run_pretrain(tiny_config, "whole_zero1_bf16_dropout", other, launcher="python")
    assert outcome.code == 2
    assert (
        "is complete, and was trained with other values; give this run another run.name, or undo:\n" in outcome.stderr
    )
    assert "optimizer.lr: 0." in outcome.stderr
    assert "keep_last" not in outcome.stderr
    assert written(run.folder) == before


@pytest.mark.parametrize(
    ("launcher", "number"),
    [("deepspeed", signal.SIGTERM), ("torchrun", signal.SIGTERM), ("torchrun", signal.SIGKILL)],
)
def test_ranks_whose_launcher_is_stopped_save_and_stop(
    start_pretrain: Start, tiny_config: Path, launcher: str, number: signal.Signals
) -> None:
    overrides = ["train.steps=50000", "train.eval_interval=null"]
    job = start_pretrain(tiny_config, f"{launcher}_{number.name}", overrides, ranks=2, launcher=launcher)
    job.wait_until(lambda: len(job.run.column("loss")) >= 3)
    below = psutil.Process(job.processes[0].pid).children(recursive=True)
    job.processes[0].send_signal(number)
    _, orphans = psutil.wait_procs(below, timeout=PATIENCE)
    for process in orphans:
        process.kill()
    assert not orphans, job.texts()
    assert job.wait().code != 0
    last = max(job.run.column("loss"))
    assert f"step_{last:08d}" in job.run.checkpoints, job.texts()


def test_a_second_interrupt_ends_a_run_in_its_step(start_pretrain: Start, tiny_config: Path) -> None:
    overrides = ["train.steps=2", "train.eval_interval=null", "data.global_batch_size=2048"]  # steps of seconds
    job = start_pretrain(tiny_config, "interrupted_twice", overrides, launcher="python")
    job.wait_until(lambda: (found := read_status(job.run.folder)) is not None and found.state == "training")
    for _ in range(2):
        job.processes[0].send_signal(signal.SIGINT)
        time.sleep(0.5)  # two that come together count as one
    outcome = job.wait()
    assert outcome.code == INTERRUPTED, outcome.stderr
    assert "error: interrupted\n" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    (attempt,) = read_attempts(job.run.folder)
    assert (attempt.exit_code, attempt.why) == (INTERRUPTED, "interrupted")


def test_a_second_interrupt_ends_a_rank_that_waits_for_one_that_is_frozen(
    start_pretrain: Start, tiny_config: Path
) -> None:
    """It waits in C++, where no handler of Python's runs."""
    job = start_pretrain(tiny_config, "interrupted_waiting", ["train.steps=50000", "train.eval_interval=null"], ranks=2)
    job.wait_until(lambda: len(job.run.column("loss")) >= 3)
    waiting, frozen = job.processes
    frozen.send_signal(signal.SIGSTOP)
    time.sleep(2)
    for _ in range(2):
        waiting.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert waiting.wait(60) == INTERRUPTED
    frozen.send_signal(signal.SIGKILL)
    assert "error: interrupted\n" in job.wait().stderr


def test_a_second_launch_of_a_run_that_trains_is_refused(
    start_pretrain: Start, run_pretrain: Pretrain, tiny_config: Path
) -> None:
    """Ranks of the second learn from their rank 0, and the first does not notice."""
    overrides = ["train.steps=50000", "train.eval_interval=null", "checkpoint.interval=1"]
    first = start_pretrain(tiny_config, "twice", overrides, launcher="python")
    first.wait_until(lambda: len(first.run.column("loss")) >= 3)
    second = run_pretrain(tiny_config, "twice", overrides, ranks=2)
    assert second.code == 2, second.stderr
    assert f"is being trained by process {first.processes[0].pid} on host {socket.gethostname()}" in second.stderr
    assert "Traceback" not in second.stderr
    at = max(first.run.column("loss"))
    first.wait_until(lambda: max(first.run.column("loss")) >= at + 3)
    first.processes[0].send_signal(signal.SIGTERM)
    outcome = first.wait()
    assert outcome.code == REQUEUE, outcome.stderr
    steps = list(outcome.run.column("loss"))
    assert steps == list(range(1, steps[-1] + 1))
    assert f"step_{steps[-1]:08d}" in outcome.run.checkpoints


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_that_broke_down_stops(run_pretrain: Pretrain, tiny_config: Path, precision: str) -> None:
    overrides = ["optimizer.lr=1.0e30", "schedule.warmup=0steps", f"deepspeed.precision={precision}"]
    outcome = run_pretrain(tiny_config, f"broken_{precision}", [*overrides, "train.steps=200"])
    assert outcome.code == 3, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "OVERFLOW" not in outcome.stderr + outcome.stdout, "DeepSpeed's own words, without a step"
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith("error: step "), outcome.stderr
    assert "gradient norm" in last
    assert "optimizer.lr" in last
    assert max(outcome.run.column("loss"), default=0) < 20, "it did not train on"
    assert not [name for name in outcome.run.checkpoints if name.startswith("step_")], "nothing broken was saved"
