"""A run folder has one writer: others are told who it is, and the lock ends with its holder."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plumbline.launcher.runtime.run.lock import RunLockedError, hold, owner_of
from tests.conftest import REPOSITORY, environment

HOLDER = """
import sys, time
from pathlib import Path
from plumbline.launcher.runtime.run.lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    while True:
        time.sleep(0.05)
        if len(sys.argv) > 2:
            Path(sys.argv[2]).touch()
"""


@contextmanager
def held_elsewhere(folder: Path, job: str = "77", pulse: Path | None = None) -> Iterator["subprocess.Popen[str]"]:
    """Hold the lock of a run folder in another process, which may write a file meanwhile; it is killed at the end."""
    words = [sys.executable, "-c", HOLDER, str(folder), *([] if pulse is None else [str(pulse)])]
    env = environment({"SLURM_JOB_ID": job})
    with subprocess.Popen(words, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()


def test_the_second_is_refused_and_told_who_the_first_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with held_elsewhere(folder) as holder:
        owner = f"process {holder.pid} on host {socket.gethostname()}, Slurm job 77, since 20"
        with pytest.raises(RunLockedError, match=f"{folder} is being trained by {owner}"), hold(folder):
            pass
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        with monkeypatch.context() as patched:
            patched.setattr("time.sleep", lambda _: pytest.fail("a second launch in the same allocation waits"))
            with pytest.raises(RunLockedError), hold(folder, patience=900.0):
                pass
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        holder.send_signal(signal.SIGKILL)
        with hold(folder, patience=900.0):  # as a requeued job waits until its dead node lets go
            facts = json.loads((folder / "lock").read_text())
    assert (facts["pid"], facts["slurm_job_id"]) == (os.getpid(), "77")


def test_the_lock_of_an_earlier_attempt_that_moves_no_more_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dead node may keep its lock at the server; an attempt that lives, on a node that Slurm has lost, keeps it."""
    pulse = tmp_path / "status.json"
    pulse.touch()
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with held_elsewhere(tmp_path):
        with pytest.raises(RunLockedError), hold(tmp_path, 0.5, pulse):
            pass  # it is this very attempt's
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        with pytest.raises(RunLockedError), hold(tmp_path, 0.5):
            pass  # nothing says whether it lives
        with hold(tmp_path, 0.5, pulse) as is_ours:
            assert is_ours()
            assert "has not given it back, and nothing of it has moved for 0.5 s" in capsys.readouterr().err
            other = held_elsewhere(tmp_path, "78")
            with pytest.raises(AssertionError), other:  # it ends instead: the new lock keeps it out
                pass
        assert json.loads((tmp_path / "lock").read_text())["slurm_restart_count"] == 1
    with held_elsewhere(tmp_path, pulse=pulse):
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        with pytest.raises(RunLockedError), hold(tmp_path, 5.0, pulse):
            pass  # it lives


def test_who_was_cut_off_finds_out_that_another_has_the_run(tmp_path: Path) -> None:
    with hold(tmp_path) as is_ours:
        assert is_ours()
        (tmp_path / "other").touch()
        (tmp_path / "other").replace(tmp_path / "lock")
        assert not is_ours()
        (tmp_path / "lock").unlink()
        assert is_ours(), "nobody else has it"


def test_a_lock_is_free_again_when_its_holder_was_killed(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as holder:
        holder.kill()
        holder.wait()
        with hold(tmp_path):
            pass


def test_who_looks_sees_the_holder_and_does_not_take_the_lock(tmp_path: Path) -> None:
    assert owner_of(tmp_path) is None
    with held_elsewhere(tmp_path) as holder:
        owner = owner_of(tmp_path)
        assert owner is not None
        assert (owner["pid"], owner["slurm_job_id"]) == (holder.pid, "77")
        with pytest.raises(RunLockedError), hold(tmp_path):
            pass
        holder.kill()
        holder.wait()
        assert owner_of(tmp_path) is None
        assert (tmp_path / "lock").exists()
