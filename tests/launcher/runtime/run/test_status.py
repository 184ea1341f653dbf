"""Whoever trains a run keeps its status, accounts for the attempt before, and is not ended by a disk that is full."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plumbline.launcher.runtime.cluster import launch
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.status import RunStatus, begin_attempt, note_early_end
from plumbline.launcher.runtime.run.status_file import (
    ATTEMPTS,
    SILENT,
    STATUS,
    note_end_of_job,
    read_attempts,
    read_status,
)
from plumbline.launcher.runtime.system.exit_codes import UNREACHED
from tests.conftest import REPOSITORY, environment

KILLED = """
import sys, time
from pathlib import Path
from plumbline.launcher.runtime.run.status import RunStatus
status = RunStatus(Path(sys.argv[1]), 2)
status.begin(0, 0, 100, 800)
status.enter("steps")
time.sleep(0.2)
status.reached(10, 80)
status.enter("checkpoint")
status.enter("steps")
time.sleep(0.4)
status.reached(15, 120)
status.enter("evaluation")  # has the status written
print("made", flush=True)
time.sleep(900)
"""

HOLDER = """
import sys, time, torch
from pathlib import Path
from plumbline.launcher.runtime.run.status import begin_attempt
from plumbline.launcher.runtime.ranks.world import World
with begin_attempt(Path(sys.argv[1]), World(0, 0, 1, torch.device("cpu")), lambda _folder: None):
    print("made", flush=True)
    time.sleep(900)
"""


def kill_one(folder: Path, variables: dict[str, str] | None = None) -> None:
    """Let a process make 15 steps, saving after 10, and kill it once status.json says so."""
    words = [sys.executable, "-c", KILLED, str(folder)]
    with subprocess.Popen(words, cwd=REPOSITORY, env=environment(variables), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        while (status := read_status(folder)) is None or status.step != 15:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)


def test_an_attempt_ends_when_another_has_put_its_lock_in_place(tmp_path: Path) -> None:
    """As one does that was cut off from everything but its disk, while the job went on elsewhere."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        words, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stderr is not None
            assert holder.stdout.readline() == "made\n"
            (tmp_path / "other").touch()
            (tmp_path / "other").replace(tmp_path / "lock")
            assert holder.wait(60) == UNREACHED
            assert "another attempt has put its lock in the place of this one's" in holder.stderr.read()
        finally:
            holder.kill()


def test_the_next_attempt_accounts_for_the_one_that_was_killed(tmp_path: Path) -> None:
    kill_one(tmp_path)
    silent = read_status(tmp_path)
    assert silent is not None
    assert (silent.state, silent.starts, silent.attempt.ranks, silent.attempt.exit_code) == ("evaluating", 1, 2, None)
    assert read_attempts(tmp_path) == []
    assert silent.attempt.seconds["start_up"] > 0.2, "since the kernel made the process, imports included"

    with RunStatus(tmp_path) as status:
        (closed,) = read_attempts(tmp_path)
        assert (closed.why, closed.last_step, closed.exit_code) == (SILENT, 15, None)
        assert closed.seconds["lost"] == pytest.approx(closed.end - silent.attempt.end, abs=0.01)
        status.begin(10, 80, 100, 800)
        (settled,) = read_attempts(tmp_path)
        assert 0.2 <= settled.seconds["steps"] <= closed.seconds["steps"] - 0.4 + 0.01, "those to the checkpoint"
        assert settled.seconds["lost"] - closed.seconds["lost"] == pytest.approx(
            closed.seconds["steps"] - settled.seconds["steps"], abs=0.01
        )
        status.enter("steps")
        assert status.end(0, "complete") == 0
        assert status.end(1, "and then a bug") == 1, "who comes second is not heard"
    killed, whole = read_attempts(tmp_path)
    assert whole.queued == killed.end
    assert (whole.first_step, whole.exit_code, whole.why, whole.host) == (10, 0, "complete", socket.gethostname())
    found = read_status(tmp_path)
    assert found is not None
    assert (found.state, found.starts, found.attempt) == ("complete", 2, whole)
    for attempt in (killed, whole):
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.end - attempt.queued, abs=0.01)


def test_an_exception_that_nobody_takes_is_a_bug(tmp_path: Path) -> None:
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises(KeyError), begin_attempt(tmp_path, world, lambda _: None):
        raise KeyError("no such thing")
    (attempt,) = read_attempts(tmp_path)
    assert (attempt.exit_code, attempt.why, attempt.first_step) == (1, "KeyError: 'no such thing'", None)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    world = World(rank=1, local_rank=1, size=1, device=torch.device("cpu"))
    with begin_attempt(tmp_path, world, lambda _: None) as status:
        status.begin(0, 0, 10, 80)
        status.enter("data_wait")
        status.enter("steps")
        assert status.ledger.spent("data_wait") > 0
        status.end(0, "complete")
    assert not list(tmp_path.glob("*.json*"))


def test_a_start_that_was_refused_leaves_the_numbers_of_the_run(tmp_path: Path) -> None:
    with RunStatus(tmp_path, ranks=2) as status:
        status.begin(0, 0, 100, 800)
        status.reached(15, 120)
        status.logged({"loss": 3.25, "tokens_per_second": 100.0})
        status.end(85, "stopped on request")
    before = read_status(tmp_path)
    for message in ("another model", "another one still"):
        note_early_end(tmp_path, 1, lambda _: None, 2, message)
    found = read_status(tmp_path)
    assert before is not None
    assert found is not None
    assert (found.state, found.starts, found.attempt.why) == ("stopped", 3, "another one still")
    assert found == replace(before, starts=3, updated=found.updated, attempt=found.attempt)
    assert (found.step, found.total_steps, found.loss, found.tokens_per_second) == (15, 100, 3.25, 100.0)
    with RunStatus(tmp_path) as starting:
        while (seen := read_status(tmp_path)) is None or seen.starts < 4:
            time.sleep(0.01)
        starting.end(2, "refused")
    assert (seen.state, seen.step, seen.loss) == ("starting", 15, 3.25), "a kill here would leave that"
    assert seen.total_steps is None, "what it asks for is not known yet, and no result is of that"


def complete(folder: Path) -> None:
    """Make all steps of a run."""
    with RunStatus(folder) as status:
        status.begin(0, 0, 10, 80)
        status.enter("steps")
        time.sleep(0.1)
        status.reached(10, 80)
        status.end(0, "complete")


def test_a_start_that_was_refused_on_a_complete_run_is_none(tmp_path: Path) -> None:
    complete(tmp_path)
    before = [(tmp_path / name).read_text() for name in (STATUS, ATTEMPTS)]
    with RunStatus(tmp_path) as status:
        status.end(2, "another model")
    assert [(tmp_path / name).read_text() for name in (STATUS, ATTEMPTS)] == before
    with RunStatus(tmp_path) as status:
        status.begin(10, 80, 20, 160)
        status.end(2, "it does not fit the devices")
    assert [attempt.exit_code for attempt in read_attempts(tmp_path)] == [0, 2], "training had begun"


@pytest.mark.parametrize(
    ("submitted", "queue"), [(None, 0.0), (40.0, 20.0), (-50.0, 60.0)], ids=["by hand", "after", "before the end"]
)
def test_the_time_that_a_run_was_complete_is_not_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submitted: float | None, queue: float
) -> None:
    """A run that is made longer 60 seconds later, by a job submitted so many seconds after the end."""
    complete(tmp_path)
    (first,) = read_attempts(tmp_path)
    started = first.end + 60
    job = None if submitted is None else launch.JobTimes(submitted=first.end + submitted, started=started)
    monkeypatch.setattr(launch, "process_start", lambda: started)
    monkeypatch.setattr(launch, "job_times", lambda: job)
    with RunStatus(tmp_path) as status:
        status.begin(10, 80, 20, 160)
        status.end(85, "stopped on request")
    second = read_attempts(tmp_path)[1]
    assert second.seconds["queue"] == pytest.approx(queue, abs=0.01)
    assert second.queued == pytest.approx(started - queue, abs=0.01)
    assert sum(second.seconds.values()) == pytest.approx(second.end - second.queued, abs=0.01)


def test_a_status_that_cannot_be_written_or_read_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / STATUS).mkdir()  # nothing takes its place
    with RunStatus(tmp_path) as status:
        status.begin(0, 0, 10, 80)
        status.enter("steps")
        status.enter("evaluation")
        time.sleep(1)
        status.end(0, "complete")
    errors = capsys.readouterr().err
    assert "earlier attempts of this run are not accounted for" in errors
    assert errors.count("cannot be written") == 1, "once, not every few seconds"
    assert read_attempts(tmp_path)[0].exit_code == 0


def test_damaged_accounts_are_kept_beside_the_new_ones(tmp_path: Path) -> None:
    (tmp_path / ATTEMPTS).write_text("[{\n{}\n")
    with RunStatus(tmp_path) as status:
        status.begin(0, 0, 10, 80)
        status.end(0, "complete")
    assert (tmp_path / f"{ATTEMPTS}.damaged").read_text() == "[{\n{}\n"
    assert [attempt.exit_code for attempt in read_attempts(tmp_path)] == [0]


def test_accounts_that_the_disk_cannot_read_are_kept_as_well(tmp_path: Path) -> None:
    (tmp_path / ATTEMPTS).symlink_to("/proc/self/mem")  # at whose start Linux reads nothing but an I/O error
    with RunStatus(tmp_path) as status:
        status.end(0, "complete")
    assert (tmp_path / f"{ATTEMPTS}.damaged").is_symlink()
    assert [attempt.exit_code for attempt in read_attempts(tmp_path)] == [0]


SCONTROL = """\
#!/bin/bash
echo "$*" >> {folder}/asked
echo "JobId=7 JobName=a SubmitTime={submit} EligibleTime={submit} StartTime={start} BatchFlag={batch}"
"""


def put_scontrol(folder: Path, submitted: float, started: float, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a Slurm on the path that says when job 7 was submitted and started, and be its first step."""
    times = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment)) for moment in (submitted, started)]
    (folder / "scontrol").write_text(SCONTROL.format(folder=folder, submit=times[0], start=times[1], batch=batch))
    (folder / "scontrol").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name, value in (("JOB_ID", "7"), ("STEP_ID", "0"), ("RESTART_COUNT", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_the_first_attempt_of_a_job_waited_since_it_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = int(launch.process_start())
    put_scontrol(tmp_path, launched - 50, launched - 20, 1, monkeypatch)
    run = tmp_path / "run"
    run.mkdir()
    with RunStatus(run) as status:
        status.end(85, "stopped on request")
    (attempt,) = read_attempts(run)
    assert (attempt.queued, attempt.start, attempt.seconds["queue"]) == (launched - 50, launched - 20, 30)
    assert attempt.seconds["start_up"] > 20, "its nodes were there before rank 0 was launched"
    assert (attempt.slurm_job_id, attempt.slurm_restart_count) == ("7", 1)

    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")  # of the last task of an array
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert launch.job_times() is not None
    assert (tmp_path / "asked").read_text().splitlines()[-1].endswith("show job 7_3"), "7 is all tasks of the array"

    put_scontrol(tmp_path, launched - 50, launched - 20, 0, monkeypatch)
    assert launch.job_times() is None, "a shell that holds an allocation"
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    put_scontrol(tmp_path, launched - 50, launched - 20, 1, monkeypatch)
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert launch.job_times() is None, "the time before belongs to another step"


def test_the_end_of_a_job_is_that_of_its_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    kill_one(tmp_path, job)
    note_end_of_job(tmp_path, 137)
    assert read_attempts(tmp_path) == [], "this process is in no job"
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    note_end_of_job(tmp_path, 137)
    (killed,) = read_attempts(tmp_path)
    status = read_status(tmp_path)
    assert status is not None
    assert (killed.exit_code, killed.why, status.state, status.attempt) == (137, SILENT, "failed", killed)
    assert killed.seconds["lost"] > 0

    with RunStatus(tmp_path) as running:
        running.end(85, "stopped on request")
    before = read_attempts(tmp_path)
    time.sleep(0.05)
    note_end_of_job(tmp_path, 85)
    first, last = read_attempts(tmp_path)
    assert first == before[0]
    assert last.exit_code == 85
    assert last.seconds["shutdown"] >= 0.05
    assert last.end - before[1].end == pytest.approx(last.seconds["shutdown"] - before[1].seconds["shutdown"], abs=0.01)
    assert (tmp_path / ATTEMPTS).exists()
