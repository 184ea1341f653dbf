"""What requeue.py makes of what ranks said, and of a disk that is away; tests/slurm shows the rest on a cluster."""

import errno
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from plumbline.launcher.requeue import NOT_REQUEUED, main, without
from plumbline.launcher.runtime.cluster.attempts import FROZEN, LACKING, accuse, accused, once_the_disk_is_back
from plumbline.launcher.runtime.cluster.nodes import PAUSES
from plumbline.launcher.runtime.run.interventions import INTERVENTIONS, Intervention, write_interventions
from plumbline.launcher.runtime.run.status import note_early_end
from plumbline.launcher.runtime.run.status_file import told_by_rank_0
from plumbline.launcher.runtime.system.exit_codes import BROKEN, UNREACHED, UNUSABLE

SCONTROL = """\
#!/bin/bash
echo "$1" >> {folder}/asked
case "$*" in
*"show job"*) echo "JobId=7 JobState=RUNNING Reason=None NodeList=n[1-2] ExcNodeList=(null) NumNodes=2-2 \
Partition=big Features=(null)" ;;
*"show hostnames"*) printf 'n1\nn2\n' ;;
*"show node"*) echo "slurm_load_node error: Access/permission denied" >&2; exit 1 ;;
requeue*) [[ ! -e {folder}/refuses ]] || {{ echo "Requested operation is presently disabled" >&2; exit 1; }} ;;
esac
"""


@pytest.fixture
def in_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be job 7 of a made-up Slurm that tells nothing of nodes; main() decides about an attempt that crashed."""
    for name, text in (("scontrol", SCONTROL.format(folder=tmp_path)), ("srun", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "config.yaml").write_text("run: {name: crashed}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    arguments = ["--config", str(tmp_path / "config.yaml"), f"run.root={tmp_path}", "--code", "1", "--before", "0"]
    monkeypatch.setattr(sys, "argv", ["requeue.py", *arguments])
    return tmp_path


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


def test_what_ranks_say_of_most_nodes_is_not_about_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    accuse(tmp_path, ["n1", "n2"], LACKING)
    assert accused(tmp_path, ["n1"]) == {"n1": LACKING}, "of one node nobody knows better"
    assert accused(tmp_path, ["n1", "n3"]) == {"n1": LACKING}
    assert accused(tmp_path, ["n1", "n2"]) == {}
    assert accused(tmp_path, ["n1", "n2", "n3"]) == {}
    assert accused(tmp_path, ["n1", "n2", "n3", "n4"]) == {"n1": LACKING, "n2": LACKING}


def test_the_decision_says_which_nodes_the_job_does_without() -> None:
    faults = {"n1": LACKING, "n2": FROZEN}
    assert without({}, []) == ""
    assert without(faults, ["n1", "n2"]) == ", without n1, n2 (n1 lacks GPUs and n2 is frozen)"
    assert without(faults, ["n1"]) == (
        ", without n1 (n1 lacks GPUs); n2 is frozen, but without it there are too few nodes"
    )
    assert without(faults, []) == "; n1 lacks GPUs and n2 is frozen, but without it there are too few nodes"


def test_a_disk_that_is_away_for_a_moment_is_waited_for(waits: list[float]) -> None:
    answers: Iterator[int | None] = iter([errno.EIO, errno.ESTALE, None])

    def look() -> str:
        if (number := next(answers)) is not None:
            raise OSError(number, "the server starts again")
        return "step 7"

    assert once_the_disk_is_back(look) == "step 7"
    assert waits == [10.0, 10.0]


@pytest.mark.parametrize(("number", "pauses"), [(errno.EIO, PAUSES), (errno.ENOENT, ())])
def test_it_is_not_waited_for_without_end_or_reason(waits: list[float], number: int, pauses: tuple[float, ...]) -> None:
    def look() -> None:
        raise OSError(number, "no")

    with pytest.raises(OSError, match="no"):
        once_the_disk_is_back(look)
    assert tuple(waits) == pauses


def test_what_rank_0_has_refused_is_known_to_the_job_that_it_ran_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told_by_rank_0(tmp_path) is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    note_early_end(tmp_path, 2, lambda _folder: None, UNUSABLE, "metrics.trackers: not installed")
    assert told_by_rank_0(tmp_path) == UNUSABLE
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert told_by_rank_0(tmp_path) is None, "that was the attempt before"


@pytest.mark.parametrize(("code", "final"), [(UNUSABLE, True), (BROKEN, True), (UNREACHED, False)])
def test_what_rank_0_says_of_itself_is_final(
    in_job: Path, capsys: pytest.CaptureFixture[str], code: int, final: bool
) -> None:
    """The other ranks waited for it and were killed, or lost it: srun returns the higher code."""
    (in_job / "crashed").mkdir()
    note_early_end(in_job / "crashed", 2, lambda _folder: None, code, "what it said")
    assert main() == (NOT_REQUEUED if final else 0)
    assert f"requeue.py: exit code {code if final else 1}, " in capsys.readouterr().out
    assert ("requeue" in (in_job / "asked").read_text().splitlines()) is not final


def test_a_job_that_rehearses_its_run_does_so_once(in_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.argv.append("--dry-run")
    assert main() == NOT_REQUEUED
    assert capsys.readouterr().out == "requeue.py: exit code 1 of a dry run: not requeued\n"
    assert not (in_job / "asked").exists(), "Slurm is asked for nothing"
    assert not (in_job / "crashed").exists(), "and nothing is counted"


def test_a_job_goes_on_where_slurm_tells_its_users_nothing_of_nodes(
    in_job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuse(in_job / "crashed" / "slurm", ["n1"], LACKING)
    assert main() == 0
    assert capsys.readouterr().out == (
        "requeue.py: exit code 1, nothing saved after step 0, fruitless attempt 1 of 2 in a row "
        "(PLUMBLINE_FRUITLESS_ATTEMPTS): back into the queue; nodes could not be asked (scontrol --oneliner show node: "
        "slurm_load_node error: Access/permission denied): none is left out\n"
    )
    assert (in_job / "asked").read_text().splitlines()[-1] == "requeue"


def test_a_rollback_is_progress(
    in_job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "40"])
    (in_job / "crashed" / "checkpoints" / "step_00000020").mkdir(parents=True)
    record = in_job / "crashed" / INTERVENTIONS
    back = Intervention("2026-11-29T00:00:00+00:00", "loss_spike", "a spike", 38, 45, 20, (37, 45))
    for made, words in (
        ([], "nothing saved after step 20, fruitless attempt 1 of 2"),
        ([replace(back, last_step=39)], "nothing saved after step 20, fruitless"),  # not what deleted step 40
        ([back], "what is saved went from step 40 to step 20, by a rollback: back into the queue"),
    ):
        write_interventions(in_job / "crashed", made)
        assert main() == 0
        assert f"exit code 1, {words}" in capsys.readouterr().out
    record.write_text("{}\n")
    assert main() == 0
    assert "nothing saved after step 20" in capsys.readouterr().out


def test_a_job_that_slurm_does_not_requeue_says_what_goes_on(in_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_job / "refuses").touch()
    assert main() == NOT_REQUEUED
    (decision,) = capsys.readouterr().out.splitlines()
    assert "back into the queue" not in decision
    assert decision.endswith(
        ", but Slurm refuses to requeue the job (scontrol requeue 7: Requested operation is presently disabled): the "
        "same command, or the next job of a chain, goes on from the newest checkpoint"
    )
