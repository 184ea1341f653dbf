"""status.py says where runs stand, by what they wrote and by whether their processes live; it changes nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.cluster.slurm_queue import QueuedJob, queued_jobs
from plumbline.launcher.runtime.report.standing import look, runs_of
from plumbline.launcher.runtime.run.interventions import INTERVENTIONS, Intervention, write_interventions
from plumbline.launcher.runtime.run.ledger import BUCKETS, Attempt
from plumbline.launcher.runtime.run.status_file import INTERVAL, Status, state_after, write_attempts
from plumbline.launcher.runtime.system import exit_codes
from plumbline.launcher.runtime.system.files import write_json
from plumbline.launcher.status import cells
from tests.conftest import REPOSITORY
from tests.launcher.runtime.run.test_lock import held_elsewhere

if TYPE_CHECKING:
    from tests.conftest import Command


def status_of(pid: int, **changes: Any) -> Status:
    """Return the status of a run that trains in a process of this host, and wrote a second ago."""
    now = round(time.time() - 1, 3)
    seconds = {**dict.fromkeys(BUCKETS, 0.0), "start_up": 20.0, "steps": 60.0, "checkpoint": 20.0}
    attempt = Attempt(
        queued=now - 100,
        start=now - 100,
        end=now,
        host=socket.gethostname(),
        pid=pid,
        slurm_job_id="77",
        slurm_restart_count=0,
        ranks=2,
        first_step=0,
        last_step=1200,
        exit_code=None,
        why=None,
        seconds=seconds,
        progress=((0, 0.0), (1000, 50.0), (1200, 60.0)),
    )
    return Status(
        state="training",
        step=1200,
        total_steps=5000,
        tokens=120_000,
        total_tokens=500_000,
        loss=3.25,
        tokens_per_second=100.0,
        checkpoint=None,
        save_seconds=None,
        starts=1,
        updated=now,
        attempt=replace(attempt, **changes),
    )


def write(folder: Path, status: Status) -> Path:
    """Write the status of a run with a checkpoint of step 1000."""
    checkpoint = folder / "checkpoints" / "step_00001000"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "manifest.json").touch()
    write_json(folder / "status.json", status.to_json())
    return folder


def test_a_run_at_work_is_told_from_a_dead_one_by_its_lock(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "alive"
    with held_elsewhere(run) as holder:
        write(run, status_of(holder.pid))
        at_work = look(run, [])
        table = command("status", run)
        holder.kill()
        holder.wait()
        dead = look(run, [QueuedJob("78", None, "Priority", "another")])
    assert (at_work.state, at_work.why, at_work.eta) == ("training", None, 3800.0)
    assert at_work.attempts[0].seconds["lost"] == 0, "nothing is lost yet"
    assert table.returncode == 0, table.stderr
    lines = table.stdout.splitlines()
    assert lines[0].split() == [
        "run",
        "state",
        "step",
        "loss",
        "tokens/s",
        "eta",
        "checkpoint",
        "starts",
        "goodput",
        "why",
    ]
    assert lines[1].startswith("alive  training  1,200/5,000  3.2500       100  1:03:20  1,000, 0:0")
    assert lines[1].endswith("ago       1    60.0%")
    shares = {line.split()[0]: line.split()[1:] for line in lines[3:]}
    assert (shares["start_up"], shares["steps"]) == (["0:20", "20.0%"], ["1:00", "60.0%"])
    assert shares["total"] == ["1:40"]
    assert lines[-1] == "goodput 60.0%: steps / total"

    assert (dead.state, dead.eta) == ("dead", None)
    assert "killed, its node failed, or nothing could be written, after 20" in str(dead.why)
    spent = dead.attempts[0].seconds
    assert spent["steps"] == 50.0, "step 1000 is saved"
    assert 10.0 < spent["lost"] <= 10.0 + INTERVAL
    assert not (run / "attempts.jsonl").exists(), "whoever looks changes nothing"


def test_a_run_on_another_host_is_judged_by_its_age(tmp_path: Path) -> None:
    here, there = status_of(7), status_of(7, host="elsewhere")
    assert look(write(tmp_path / "a", here), []).state == "dead"
    assert look(write(tmp_path / "b", there), []).state == "training"
    old = replace(there, updated=there.updated - 600, attempt=replace(there.attempt, end=there.attempt.end - 600))
    assert look(write(tmp_path / "c", old), []).state == "dead"


def test_a_run_at_work_that_writes_nothing_is_remarked(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "run") as holder:
        status = status_of(holder.pid)
        write(tmp_path / "run", replace(status, updated=status.updated - 600))
        found = look(tmp_path / "run", [])
    assert (found.state, str(found.why)[:16]) == ("training", "no update since ")


@pytest.mark.parametrize(
    ("code", "state"), [(0, "complete"), (2, "failed"), (3, "diverged"), (85, "stopped"), (86, "hung"), (1, "failed")]
)
def test_an_ending_is_told_and_a_queued_job_goes_on_with_it(tmp_path: Path, code: int, state: str) -> None:
    status = status_of(7, exit_code=code, why="so it was")
    run = write(tmp_path / "run", status)
    if code == 0:
        (run / "result.json").touch()
    write_attempts(run, [status.attempt])
    found = look(run, [])
    assert (found.state, found.why) == (state, f"so it was (exit code {code})")
    assert found.attempts[0].seconds["lost"] == (0.0 if code == 0 else 10.0)
    queued = look(run, [QueuedJob("77", None, "BeginTime", "any name")])
    expected = ("complete", found.why) if code == 0 else ("queued", "job 77: BeginTime")
    assert (queued.state, queued.why) == expected
    ended = status.attempt.end
    again = look(run, [QueuedJob("77", ended + 130, "None", "any name")])
    assert (again.state, again.why) == (("complete", found.why) if code == 0 else ("starting", "job 77"))
    same = look(run, [QueuedJob("77", ended - 130, "None", "any name")])
    assert (same.state, same.why) == (found.state, found.why), "that is a shell in which it ran, or its job's end"
    with held_elsewhere(run):
        assert look(run, []).state == "starting", "somebody has the lock, and has not written yet"


@pytest.mark.parametrize(
    ("code", "state"), [(3, "diverged"), (85, "stopped"), (86, "hung"), (1, "failed"), (None, "dead")]
)
def test_a_start_that_was_refused_leaves_the_state_of_the_run(tmp_path: Path, code: int | None, state: str) -> None:
    first = status_of(2**22 + 1, exit_code=code, why="so it was")
    refused = replace(first.attempt, pid=8, exit_code=2, why="no such corpus", first_step=None, last_step=None)
    run = write(tmp_path / "run", replace(first, attempt=refused))
    write_attempts(run, [first.attempt, refused])
    found = look(run, [])
    assert found.state == state
    assert str(found.why).startswith("so it was")
    assert str(found.why).endswith("; started again and refused: no such corpus (exit code 2)")
    write_attempts(run, [first.attempt, replace(refused, first_step=1000, last_step=1200)])
    assert (look(run, []).state, look(run, []).why) == ("failed", "no such corpus (exit code 2)"), "after training"
    write_attempts(run, [refused])
    assert (look(run, []).state, look(run, []).why) == ("failed", "no such corpus (exit code 2)"), "it never began"


def test_a_start_that_was_refused_loses_nothing_of_a_complete_run(tmp_path: Path) -> None:
    """Runs of older versions have noted such starts."""
    first = status_of(2**22 + 1, exit_code=0, why="complete")
    refused = replace(first.attempt, pid=8, exit_code=2, why="another model", first_step=None, last_step=None)
    run = write(tmp_path / "run", replace(first, attempt=refused))
    (run / "result.json").write_text('{"step": 5000}')
    write_attempts(run, [first.attempt, refused])
    found = look(run, [])
    assert (found.state, str(found.why)[:25]) == ("complete", "complete (exit code 0); s")
    assert found.attempts[0].seconds["lost"] == 0.0
    (run / "result.json").unlink()  # as docs/runs.md says to go back
    found = look(run, [])
    assert found.state == "stopped"
    assert str(found.why) == "it was complete, and result.json is gone: the same command trains on"


def test_a_run_that_was_killed_after_its_result_is_complete(tmp_path: Path) -> None:
    run = write(tmp_path / "run", status_of(pid=2**22 + 1))
    (run / "result.json").write_text('{"step": 1200}')
    assert look(run, []).state == "dead", "the result of an earlier cooldown, or of a shorter run"
    (run / "result.json").write_text('{"step": 5000}')
    assert look(run, []).state == "complete"


def test_runs_without_a_status_are_told_by_what_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "submitted", "broken"):
        (tmp_path / name / "slurm").mkdir(parents=True)
    (tmp_path / "old" / "result.json").touch()
    (tmp_path / "broken" / "status.json").write_text("{")
    begun = look(tmp_path / "submitted", [QueuedJob("5", 1.0, "None", "submitted")])
    assert (begun.state, begun.why) == ("starting", "job 5")
    waiting = [QueuedJob("5", None, "Resources", "submitted")]
    found = [look(tmp_path / name, waiting) for name in ("old", "submitted", "broken")]
    assert [standing.state for standing in found] == ["complete", "queued", "unreadable"]
    assert str(tmp_path / "broken" / "status.json") in str(found[2].why)
    monkeypatch.chdir(tmp_path / "submitted")
    here = look(Path(), waiting)
    assert (here.state, cells(here)[0]) == ("queued", "submitted")


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """Be another user, where tests run as root, whom no permission holds up."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_run_that_cannot_be_read_leaves_the_others_in_the_table() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        for run in ("closed", "damaged", "open"):
            write(root / run, status_of(7))
        (root / "damaged" / INTERVENTIONS).write_text('{"x": 1}\n')
        (root / "closed").chmod(0o700 if os.geteuid() == 0 else 0)
        (root / "others").mkdir(mode=0o711 if os.geteuid() == 0 else 0o311)  # may be entered, not listed
        with as_somebody_else():
            with pytest.raises(PermissionError, match=f"{root}/others"):
                runs_of(root / "others")
            found = [look(folder, []) for folder in runs_of(root)]
            assert runs_of(root / "closed") == [root / "closed"]
        (root / "closed").chmod(0o700)
    assert [(its.folder.name, its.state) for its in found] == [
        ("closed", "unreadable"), ("damaged", "unreadable"), ("open", "dead")
    ]  # fmt: skip
    assert f"Permission denied: '{root}/closed/" in str(found[0].why)
    assert f"{root}/damaged/{INTERVENTIONS}, line 1: no intervention" in str(found[1].why)
    assert [cells(its)[:2] for its in found] == [(its.folder.name, its.state) for its in found]


def test_a_number_that_is_none_is_named(tmp_path: Path) -> None:
    write(tmp_path, status_of(7))
    file = tmp_path / "status.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "tokens_per_second": "fast"}))
    found = look(tmp_path, [])
    assert found.state == "unreadable"
    assert str(file) in str(found.why)
    assert "tokens_per_second = 'fast': a number is expected" in str(found.why)


def test_nothing_that_a_run_says_reaches_the_terminal_as_a_command(command: Command, tmp_path: Path) -> None:
    run = write(tmp_path / "a\x1b]0;b\a", replace(status_of(7, why="\x1b[2Jgone\r"), state="\x9bfailed"))
    made = Intervention("2026-01-01T00:00:00+00:00", "spike", "\x1b[1mloss", 3, 4, 2, (2, 4))
    write_interventions(run, [made])
    printed = command("status", run).stdout
    assert "a\\x1b]0;b\\x07" in printed
    assert "\\x1b[1mloss" in printed
    assert {char for char in printed if not char.isprintable()} == {"\n"}
    row = cells(replace(look(run, []), state="\x9bfailed", why="\x1b[2Jgone\r"))
    assert (row[1], row[-1]) == ("\\x9bfailed", "\\x1b[2Jgone\\r")


def test_a_folder_stands_for_the_runs_in_it_and_that_of_a_sweep_for_its_cells(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "sweep/runs/1", "sweep/runs/2", "nothing")]
    for folder in folders:
        folder.mkdir(parents=True)
    for run in folders[:4]:
        (run / "config.yaml").touch()
    (tmp_path / "sweep" / "lock").touch()
    assert runs_of(tmp_path / "a") == [tmp_path / "a"]
    assert runs_of(tmp_path / "sweep") == folders[2:4]
    assert runs_of(tmp_path) == folders[:2], "a sweep that lies beside runs is none of them"
    with pytest.raises(ValueError, match="no run was ever begun there"):
        runs_of(tmp_path / "nothing")


def test_the_queue_is_asked_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    lines = "12|PENDING|N/A|Priority|a|b\\n13|RUNNING|1970-01-02T00:00:00|None|c\\n14|CONFIGURING|N/A|None|d\\n"
    squeue.write_text(f"#!/bin/bash\n[[ $* == *PENDING* ]] && printf '{lines}'\n")
    squeue.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin:/bin")
    day = datetime(1970, 1, 2).timestamp()
    assert queued_jobs() == [
        QueuedJob("12", None, "Priority", "a|b"), QueuedJob("13", day, "None", "c"), QueuedJob("14", 0.0, "None", "d")
    ]  # fmt: skip
    squeue.write_text("#!/bin/bash\necho 'no controller' >&2; exit 1\n")
    assert queued_jobs() == []
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert queued_jobs() == []


def test_every_exit_code_and_its_state_is_in_the_table() -> None:
    page = (REPOSITORY / "docs" / "runs.md").read_text(encoding="utf-8")
    table = {int(code): state for code, state in re.findall(r"^\| (\d+) \| (\w+) \|", page, re.MULTILINE)}
    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    of_others = {exit_codes.UNREAD, exit_codes.ELSEWHERE}
    assert table.keys() == codes - of_others, "the others are those of every command, or of sweep.py"
    assert table == {code: state_after(code) for code in table}


def test_what_is_no_run_is_one_error(command: Command, tmp_path: Path) -> None:
    done = command("status", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}: no run was ever begun there; give the folder of a run or of a sweep\n"
    done = command("status", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "no such file or folder" in done.stderr


def test_the_document_has_all_attempts(command: Command, tmp_path: Path) -> None:
    status = status_of(7, exit_code=85, why="stopped on request", last_step=1000, progress=((0, 0.0), (1000, 60.0)))
    runs = [write(tmp_path / name, status) for name in ("a", "b")]
    done = command("status", *runs, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["runs"]
    assert [each["run"] for each in found] == [str(run) for run in runs]
    assert found[0]["attempts"] == [status.attempt.to_json()]
    assert (found[0]["goodput"], found[0]["seconds"]["checkpoint"]) == (0.6, 20.0)
    assert found[0]["checkpoint"]["step"] == 1000
