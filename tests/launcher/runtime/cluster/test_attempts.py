"""What becomes of a job after an attempt: which exit codes end it, and how many fruitless attempts in a row."""

from pathlib import Path

import pytest

from plumbline.launcher.runtime.cluster.attempts import (
    ACCUSED,
    LACKING,
    VARIABLE,
    WRONG,
    Decision,
    EndedAttempt,
    accuse,
    accused,
    decide,
    read_limit,
)

NODES = ["n1", "n2", "n3", "n4", "n5", "n6"]


@pytest.fixture
def tally(tmp_path: Path) -> Path:
    return tmp_path / "run" / "slurm" / "attempts.json"


@pytest.mark.parametrize(
    ("code", "words"), [(0, "complete"), (2, "cannot be used"), (3, "broke down"), (4, "what is left of its share")]
)
def test_some_exit_codes_are_final_whatever_was_saved(tally: Path, code: int, words: str) -> None:
    decision = decide(EndedAttempt(code, (0,), (10,)), tally, 2)
    assert not decision.requeue
    assert decision.reason.startswith(f"exit code {code}, ")
    assert decision.reason.endswith(words)
    assert not tally.exists()


@pytest.mark.parametrize("code", [1, 85, 137, 143, 233])
def test_every_other_is_worth_another_attempt_while_checkpoints_advance(tally: Path, code: int) -> None:
    for step in range(0, 100, 10):
        reason = f"exit code {code}, what is saved went from step {step} to step {step + 10}"
        assert decide(EndedAttempt(code, (step,), (step + 10,)), tally, 1) == Decision(True, reason)


def test_fruitless_attempts_are_counted_in_a_row(tally: Path) -> None:
    def requeued(before: int, after: int) -> bool:
        return decide(EndedAttempt(1, (before,), (after,)), tally, 3).requeue

    assert [requeued(5, 5), requeued(5, 5), requeued(5, 6)] == [True, True, True]
    assert [requeued(6, 6), requeued(6, 6), requeued(6, 6)] == [True, True, False]


def test_a_preemption_is_not_counted(tally: Path) -> None:
    """With GraceTime the ranks may have ended by themselves, before they made a step."""
    assert decide(EndedAttempt(1, (5,), (5,)), tally, 2).requeue
    for _ in range(3):
        decision = decide(EndedAttempt(85, (5,), (5,), preempted=True), tally, 2)
        assert decision == Decision(True, "exit code 85 of a job that Slurm preempts")
    assert not decide(EndedAttempt(2, (5,), (5,), preempted=True), tally, 2).requeue
    assert not decide(EndedAttempt(1, (5,), (5,)), tally, 2).requeue


def test_an_attempt_that_slurm_ended_after_a_checkpoint_ends_the_row(tally: Path) -> None:
    assert decide(EndedAttempt(1, (5,), (5,)), tally, 2).requeue
    # Here an attempt went from 5 to 8 and was preempted: nobody was asked
    assert decide(EndedAttempt(1, (8,), (8,)), tally, 2).requeue
    assert not decide(EndedAttempt(1, (8,), (8,)), tally, 2).requeue


def test_a_checkpoint_that_went_away_is_no_progress(tally: Path) -> None:
    decision = decide(EndedAttempt(1, (9,), (5,)), tally, 2)
    assert "nothing saved after step 5, fruitless attempt 1 of 2" in decision.reason


def test_what_cannot_be_counted_is_not_tried_for_ever(tally: Path) -> None:
    tally.parent.parent.write_text("a file where the run folder should be")
    with pytest.raises(OSError):  # noqa: PT011
        decide(EndedAttempt(1, (5,), (5,)), tally, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read: Expecting value"),
        ('{"fruitless": 1}', "saved = None: expected a value of type list"),
        ('{"saved": [5]}', "fruitless = None: expected a value of type int"),
    ],
)
def test_a_damaged_count_begins_anew(tally: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    tally.parent.mkdir(parents=True)
    tally.write_text(text)
    assert "fruitless attempt 1 of 2" in decide(EndedAttempt(1, (5,), (5,)), tally, 2).reason
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tally}: {words}")
    assert line.endswith("; fruitless attempts are counted anew")
    assert "fruitless attempt 2 of 2" in decide(EndedAttempt(1, (5,), (5,)), tally, 2).reason


def test_the_limit_is_two_unless_the_site_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_limit() == 2
    monkeypatch.setenv(VARIABLE, "5")
    assert read_limit() == 5
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{VARIABLE} is {wrong}: give the number of fruitless attempts"):
            read_limit()


def test_of_a_sweep_a_finished_run_counts_more_than_any_checkpoint(tally: Path) -> None:
    reason = (
        "exit code 1, what is saved went from 2 finished runs and 900 steps of others to 3 finished runs and 0 steps"
    )
    assert decide(EndedAttempt(1, (2, 900), (3, 0)), tally, 1) == Decision(True, f"{reason} of others")
    assert not decide(EndedAttempt(1, (3, 0), (3, 0)), tally, 1).requeue


def test_the_count_is_the_same_for_all_jobs_of_a_chain(tally: Path) -> None:
    ends = [decide(EndedAttempt(1, (5,), (5,)), tally, 2) for _ in range(3)]
    assert [decision.requeue for decision in ends] == [True, False, False], "the next job has one attempt"
    assert "fruitless attempt 3 of 2 in a row" in ends[2].reason


def test_what_was_said_against_nodes_holds_for_one_attempt_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they lacked may be mended by the next, and ranks of several nodes speak at once."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    accuse(tmp_path, ["n1", "n2"], WRONG)
    accuse(tmp_path, ["n3"], LACKING)
    assert accused(tmp_path, NODES) == {"n1": WRONG, "n2": WRONG, "n3": LACKING}
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert accused(tmp_path, NODES) == {}
    accuse(tmp_path, ["n2"], LACKING)
    (tmp_path / ACCUSED / "n1.json").write_text("[]")
    assert accused(tmp_path, NODES) == {"n2": LACKING}
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert accused(tmp_path, NODES) == {}


def test_an_attempt_counts_once_however_often_it_is_written_down(tally: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may go away when the count is written, and the job then decides again."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for _ in range(3):
        assert "fruitless attempt 1 of 2" in decide(EndedAttempt(1, (5,), (5,)), tally, 2).reason
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "fruitless attempt 2 of 2" in decide(EndedAttempt(1, (5,), (5,)), tally, 2).reason


def test_words_against_nodes_that_cannot_be_read_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    accuse(tmp_path, ["n1"], WRONG)
    for name, text in (("n2", "{"), ("n3", "{}")):
        (tmp_path / "accused" / f"{name}.json").write_text(text)
    assert accused(tmp_path, NODES) == {"n1": WRONG}
