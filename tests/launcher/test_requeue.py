"""What requeue.py makes of what ranks said, and of a disk that is away; tests/slurm shows the rest on a cluster."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from plumbline.launcher.requeue import without
from plumbline.launcher.runtime.run.status import note_refusal
from plumbline.launcher.runtime.run.status_file import told_by_rank_0
from plumbline.launcher.runtime.system.attempts import FROZEN, LACKING, accuse, accused, once_the_disk_is_back
from plumbline.launcher.runtime.system.exit_codes import UNUSABLE
from plumbline.launcher.runtime.system.nodes import PAUSES


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
    note_refusal(tmp_path, 2, lambda _folder: None, UNUSABLE, ValueError("metrics.trackers: not installed"))
    assert told_by_rank_0(tmp_path) == UNUSABLE
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert told_by_rank_0(tmp_path) is None, "that was the attempt before"
