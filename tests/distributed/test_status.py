"""A run says where it stands and where its time went, however it ends; of one that was killed, others find it out."""

from __future__ import annotations

import json
import re
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.run.status import RunStatus
from plumbline.launcher.runtime.run.status_file import INTERVAL
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train.train import train
from tests.conftest import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Command, Outcome, Pretrain, Start

QUICK = ["train.eval_interval=null", "metrics.diagnostics_interval=null", "checkpoint.interval=100"]


def attempts_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "attempts.jsonl").read_text().splitlines()]


def status_of(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.folder / "status.json").read_text())
    return found


def standing(command: Command, run: Run) -> dict[str, Any]:
    """Return what status.py says."""
    done = command("status", run.folder, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["runs"][0]
    return found


def test_the_time_of_a_run_that_was_killed_adds_up(start_pretrain: Start, command: Command, tiny_config: Path) -> None:
    """SIGKILL to both ranks, in the middle of steps that no checkpoint has."""
    launched = time.time()
    overrides = [*QUICK, "train.steps=50000", "checkpoint.keep_last=1"]
    job = start_pretrain(tiny_config, "lost", overrides, ranks=2)
    run = job.run

    def has_steps_to_lose() -> bool:
        status = status_of(run)
        return status["checkpoint"] is not None and 3 <= status["step"] - status["checkpoint"]["step"] < 50

    job.wait_until(lambda: (run.folder / "status.json").exists() and status_of(run)["tokens_per_second"])
    at_work = standing(command, run)
    job.wait_until(has_steps_to_lose)
    job.kill()
    assert at_work["state"] in ("training", "saving")
    assert (at_work["why"], at_work["starts"]) == (None, 1)
    assert at_work["eta_seconds"] > 0
    dead = standing(command, run)
    assert dead["state"] == "dead"
    assert status_of(run)["state"] in ("training", "saving"), "what it said last"
    known, took, waited = status_of(run)["step"], seconds_of_steps(run), run.column("data_wait")

    steps = max(took) + 10
    again = start_pretrain(tiny_config, "lost", [*overrides, f"train.steps={steps}"], ranks=2).wait()
    over = time.time()
    assert again.code == 0, again.stderr
    killed, whole = attempts_of(run)
    resumed = whole["first_step"]
    assert resumed == dead["checkpoint"]["step"] < known == killed["last_step"]
    assert (killed["exit_code"], whole["exit_code"], whole["last_step"]) == (None, 0, steps)
    assert resumed < max(took) >= known - 1, "a step is logged once the next one is made"
    logged = range(resumed + 1, min(known, max(took)) + 1)
    repeated = sum(took[step] - waited[step] for step in logged)
    not_logged = known - logged[-1]
    longest = INTERVAL + (1 + not_logged) * max(took.values())
    assert repeated - 0.05 <= killed["seconds"]["lost"] <= repeated + longest
    assert killed["seconds"]["lost"] == pytest.approx(dead["seconds"]["lost"], abs=INTERVAL)
    assert whole["seconds"]["lost"] == 0

    done = standing(command, run)
    assert (done["state"], done["starts"], done["attempts"]) == ("complete", 2, [killed, whole])
    for attempt in (killed, whole):
        between = moment(attempt["end"]) - moment(attempt["queued"])
        assert sum(attempt["seconds"].values()) == pytest.approx(between, abs=0.02)
        assert min(attempt["seconds"].values()) >= 0
    assert killed["queued"] == killed["start"]
    assert whole["queued"] == killed["end"]
    assert 0 <= over - launched - sum(done["seconds"].values()) < 10, "from the first start to the last end"
    assert done["goodput"] == pytest.approx(done["seconds"]["steps"] / sum(done["seconds"].values()))
    assert done["seconds"]["steps"] > 0


def seconds_of_steps(run: Run) -> dict[int, float]:
    """Return the seconds of each step, of 256 tokens, by the speed in metrics.jsonl."""
    return {step: 256 / speed for step, speed in run.column("tokens_per_second").items()}


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def assert_ended(outcome: Outcome, state: str, code: int, why: str) -> dict[str, Any]:
    """Check how the last attempt of a run ended, in all that is written."""
    assert outcome.code == code, outcome.stderr
    status = status_of(outcome.run)
    assert status["state"] == state
    assert status["attempt"]["exit_code"] == code
    assert why in status["attempt"]["why"]
    assert attempts_of(outcome.run)[-1] == status["attempt"]
    assert status["starts"] == len(attempts_of(outcome.run))
    return status


def test_every_ending_is_told(
    start_pretrain: Start, run_pretrain: Pretrain, command: Command, tiny_config: Path
) -> None:
    """Stopped; refused under the lock, then before it; complete; asked for otherwise once it is complete."""
    job = start_pretrain(tiny_config, "endings", [*QUICK, "train.steps=50000"], launcher="python")
    job.wait_until(lambda: max(job.run.column("loss"), default=0) >= 5)
    job.processes[0].send_signal(signal.SIGTERM)
    status = assert_ended(job.wait(), "stopped", 85, "stopped on request")
    made = max(job.run.column("loss"))
    assert (status["step"], status["total_steps"], status["tokens"]) == (made, 50000, 256 * made)
    assert status["loss"] == job.run.column("loss")[made]
    assert status["checkpoint"]["step"] == made

    def again(*overrides: str) -> Outcome:
        return run_pretrain(tiny_config, "endings", [*QUICK, f"train.steps={made}", *overrides], launcher="python")

    assert_ended(again("model.intermediate_size=160"), "stopped", 2, "intermediate_size")
    assert_ended(again("data.train=[{path: no/corpus}]"), "stopped", 2, "no/corpus")
    found = standing(command, job.run)
    assert found["state"] == "stopped"
    assert found["why"].startswith("stopped on request")
    assert re.search("; started again and refused: .*no/corpus.* \\(exit code 2\\)$", found["why"])
    assert_ended(again(), "complete", 0, "complete")
    assert [attempt["first_step"] for attempt in attempts_of(job.run)] == [0, None, None, made]
    before = (job.run.folder / "status.json").read_bytes()
    assert again().code == 0
    assert again("optimizer.lr=0.5").code == 2
    assert (job.run.folder / "status.json").read_bytes() == before
    assert standing(command, job.run)["seconds"]["lost"] == 0


def test_a_run_that_breaks_down_has_diverged(run_pretrain: Pretrain, tiny_config: Path) -> None:
    overrides = [*QUICK, "train.steps=1", "schedule.warmup=0steps", "optimizer.lr=1.0e39"]
    outcome = run_pretrain(tiny_config, "diverged", overrides, launcher="python")
    status = assert_ended(outcome, "diverged", 3, "not finite")
    assert status["attempt"]["last_step"] == 1


def test_waiting_for_data_is_not_training(
    tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that come late, and a first step that compiles."""
    iterate, late = TrainBatches.iterate, 0.2

    def slowly(*arguments: Any) -> Iterator[Any]:
        for batch in iterate(*arguments):
            time.sleep(late)
            yield batch

    monkeypatch.setattr(TrainBatches, "iterate", slowly)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    config = load_config(tiny_config, [*QUICK, f"run.root={tmp_path}", "train.steps=3", "train.compile=true"])
    status = RunStatus()
    assert train(config, open_inputs(config, world), world, StopRequest(), status)
    spent, waited = status.ledger.read(), Run(config.run.folder).column("data_wait")
    assert list(waited) == [1, 2, 3]
    assert min(waited.values()) >= late
    assert spent["data_wait"] == pytest.approx(sum(waited.values()), abs=0.01)
    entered = {bucket for bucket, seconds in spent.items() if seconds > 0}
    assert entered == {"start_up", "data_wait", "compile", "steps", "checkpoint", "evaluation", "shutdown"}
