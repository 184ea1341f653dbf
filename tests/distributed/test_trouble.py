"""Real ranks one of which has trouble: late with files, or unable to read them for a while, or with a broken device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.cluster.attempts import BROKEN_GPU, accused
from plumbline.launcher.runtime.run.status_file import read_attempts
from plumbline.launcher.runtime.system.exit_codes import CORRUPT, CRASHED, UNREACHED, UNUSABLE
from tests.data.made import shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Outcome, Start

SHORT = ["train.eval_interval=null", "checkpoint.interval=4", "checkpoint.keep_last=9", "metrics.trackers=[]"]


@pytest.fixture
def attempt(start: Start, tiny_config: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Train on two ranks: (steps, trouble, overrides) -> Outcome."""

    def run(steps: int, trouble: str | None, *overrides: str, **env: str) -> Outcome:
        fixed: list[Any] = ["--config", tiny_config, f"run.root={tmp_path}", "run.name=run", *SHORT]
        program = "launcher/pretrain.py" if trouble is None else "tests/distributed/trouble.py"
        arguments = [*fixed, f"train.steps={steps}", *overrides]
        return start(program, arguments, tmp_path / "run", ranks=2, env={"TROUBLE": trouble or "", **env}).wait()

    return run


def test_a_late_rank_costs_its_save_and_no_other_and_samples_may_take_their_time(
    attempt: Callable[..., Outcome],
) -> None:
    outcome = attempt(12, "late", "train.sample_prompts=[def]", "deepspeed.timeout_minutes=0.4")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr.count("checkpoint not written, ranks lost each other") == 1
    assert "warning: step 4: " in outcome.stderr
    assert [name for name in outcome.run.checkpoints if name.startswith("step_")] == ["step_00000008", "step_00000012"]
    assert "def" in (outcome.run.folder / "samples.txt").read_text()


@pytest.mark.parametrize(
    ("trouble", "words"), [("unread", ", by rank 1, could not be read"), ("unloaded", " could not be read")]
)
def test_what_one_rank_cannot_read_ends_an_attempt_of_all_and_is_not_passed_over(
    attempt: Callable[..., Outcome], trouble: str, words: str
) -> None:
    assert attempt(8, None).code == 0
    outcome = attempt(12, trouble, "deepspeed.timeout_minutes=60")
    assert outcome.code == UNREACHED, outcome.stderr
    assert read_attempts(outcome.run.folder)[-1].exit_code == UNREACHED
    assert f"step_00000008{words}" in outcome.stderr
    assert "passed over" not in outcome.stderr
    again = attempt(12, None)
    assert again.code == 0, again.stderr
    assert "resuming after step 8 from " in again.stdout


def test_a_run_that_has_worked_is_tried_again_when_the_disk_was_away(attempt: Callable[..., Outcome]) -> None:
    outcome = attempt(8, "away")
    assert outcome.code == UNUSABLE, "who starts it looks on"
    assert attempt(8, None).code == 0
    outcome = attempt(12, "away")
    assert outcome.code == UNREACHED, outcome.stderr
    assert "error: [Errno 116] Stale file handle" in outcome.stderr


@pytest.mark.parametrize("key", ["train", "validation"])
def test_a_shard_that_is_missing_is_one_error_of_all_ranks(
    attempt: Callable[..., Outcome], corpus: Path, tmp_path: Path, key: str
) -> None:
    """One rank looks for all; here nobody ends the others, who would wait for it for half an hour."""
    folder = shard(corpus, tmp_path / "sharded", [5, 12])
    (folder / "train-00001.idx").unlink()
    outcome = attempt(8, None, f"data.{key}=[{{path: {folder}}}]")
    assert outcome.code == UNUSABLE, outcome.stderr
    words = f"error: {folder}/train-00001.idx: is missing, corpus.json expects "
    assert next(line for line in outcome.stderr.splitlines() if "error" in line).startswith(words)
    assert outcome.stderr.count("is missing") == 1
    assert "2 rank(s)" in outcome.stdout, "no rank looks before all have met"


def test_a_gpu_that_reports_itself_broken_is_one_error_and_its_node_is_left_out(
    attempt: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = attempt(8, "broken", SLURM_JOB_ID="7", SLURMD_NODENAME="n5")
    assert outcome.codes[1] == CORRUPT, outcome.stderr
    assert outcome.codes[0] == CRASHED, "it lost the other in a collective, whose code is the one that counts"
    assert "another rank has ended, with which this one on n5 was exchanging numbers (" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "the GPU of this rank on n5 cannot be used (CUDA error: uncorrectable ECC error" in outcome.stderr
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert accused(outcome.run.folder / "slurm", ["n1", "n5"]) == {"n5": BROKEN_GPU}
