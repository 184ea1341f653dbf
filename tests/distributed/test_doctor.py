"""The doctor on real ranks: nothing is found where nothing is wrong, and what is wrong on one rank is found there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.config.budget import checkpoint_bytes
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.doctor.table import CHECKS

if TYPE_CHECKING:
    from tests.conftest import Outcome, Run, Start
    from tests.distributed.conftest import TrainMatrix

PROGRAM = Path(__file__).with_name("examine_ranks.py")
Examine = Callable[..., "Outcome"]


@pytest.fixture
def examine(start: Start, tiny_config: Path, tmp_path: Path) -> Examine:
    """Run the doctor (or another script) with a fault on the last rank, in a run folder under tmp_path."""

    def run(fault: str, ranks: int = 2, *, script: str = "doctor", root: Path = tmp_path, limit: int = 30) -> Outcome:
        own = ["--json", "--limit", str(limit)] if script == "doctor" else ["train.steps=1", "schedule.warmup=0steps"]
        arguments = [script, ranks - 1, fault, "--config", tiny_config, f"run.root={root}", *own]
        return start(PROGRAM, arguments, root / "tiny", ranks=ranks).wait()

    return run


def findings(outcome: Outcome, level: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(outcome.stdout)["findings"]
    return [finding for finding in found if finding["level"] == level]


def test_two_good_ranks_are_fine(examine: Examine, tmp_path: Path) -> None:
    outcome = examine("nothing")
    assert outcome.codes == (0, 0), outcome.stdout + outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["ranks"] == 2
    assert [finding["check"] for finding in document["findings"]] == [check.name for check in CHECKS]
    assert [report["node"] for report in document["measured"]["versions"]] == ["good0", "broken"]
    assert document["measured"]["shared files"][0]["locks"] == {"fcntl": "held", "flock": "held"}
    assert document["measured"]["shared files"][1]["locks"] == {"fcntl": "refused", "flock": "refused"}
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind, no run folder either"


@pytest.mark.parametrize(
    ("fault", "check", "level", "text"),
    [
        ("other_python", "versions", "bad", "rank 1: python 3.9.1, "),
        ("other_variable", "versions", "warning", "rank 1: NCCL_ALGO is Ring, not set on most ranks"),
        ("wrong_sums", "collectives", "bad", "all-reduce in bf16: what rank 1 contributes arrives changed"),
        ("wrong_shares", "collectives", "bad", "reduce-scatter in bf16: what rank 1 contributes arrives changed"),
        ("wrong_exchange", "collectives", "bad", "all-to-all in bf16: what rank 1 contributes arrives changed"),
        ("fast_clock", "clocks", "warning", "the clock of rank 1 is 120.0 s ahead of rank 0's"),
    ],
)
def test_what_is_wrong_on_a_rank_is_found_there(
    examine: Examine, fault: str, check: str, level: str, text: str
) -> None:
    outcome = examine(fault)
    assert outcome.code == (1 if level == "bad" else 0), outcome.stderr
    found = findings(outcome, level)
    assert {(finding["check"], finding["node"]) for finding in found} == {(check, "broken")}, found
    assert [finding for finding in found if finding["text"].startswith(text)], found
    assert all(finding["remedy"] for finding in found)


def test_a_slow_rank_is_named_by_the_others(examine: Examine) -> None:
    found = findings(examine("slow", ranks=3), "bad")
    assert [(finding["check"], finding["node"]) for finding in found] == [("pairs", "broken")]
    assert found[0]["text"].startswith("rank 2 exchanges ")


def test_a_rank_that_does_not_arrive_is_named(examine: Examine) -> None:
    outcome = examine("never_arrives", ranks=3, limit=15)
    assert outcome.codes == (1, 1, 9)
    found = findings(outcome, "bad")
    assert [finding["check"] for finding in found] == ["arrival"]
    assert found[0]["text"].startswith("rank(s) 2 did not arrive within 15 s; arrived: 0 (good0), 1 (good1)")


def test_the_rank_that_serves_the_others_is_named_when_it_does_not_arrive(start: Start, tmp_path: Path) -> None:
    outcome = start(PROGRAM, ["doctor", 0, "never_arrives", "--limit", 2], tmp_path, ranks=2).wait()
    assert outcome.codes == (9, 1)
    assert "\nerror on rank 1: 127.0.0.1:" in outcome.stderr
    assert "rank 0 did not start, or this node does not reach that address" in outcome.stderr


def test_a_rank_that_dies_in_a_check_is_named(examine: Examine) -> None:
    outcome = examine("dies_in_a_check", limit=15)
    assert outcome.codes == (1, 7)
    found = findings(outcome, "bad")
    assert [(finding["check"], finding["node"]) for finding in found] == [("collectives", "broken")]
    assert found[0]["text"] == "rank 1 did not come out of this check within 37.5 s"


def test_a_rank_that_fails_in_a_check_is_named_and_nobody_waits_in_the_next(examine: Examine) -> None:
    outcome = examine("raises_in_a_check", limit=15)
    assert outcome.code == 1, outcome.stderr
    named = {finding["node"]: finding["text"] for finding in findings(outcome, "bad")}
    assert named["broken"] == "rank 1: RuntimeError: connection reset by peer"
    assert [finding["check"] for finding in findings(outcome, "warning")] == ["pairs"]


def test_the_rank_that_judges_may_itself_wait_for_ever(start: Start, tmp_path: Path) -> None:
    words = ["doctor", 0, "waits_for_ever", "--json", "--limit", 10]
    outcome = start(PROGRAM, words, tmp_path, ranks=2).wait()
    assert outcome.codes == (1, 1), outcome.stderr
    named = {finding["node"]: finding["text"] for finding in findings(outcome, "bad")}
    assert named.keys() == {"broken", "good1"}
    assert named["broken"].startswith("rank 0: nothing came of it within 20 s; ")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "small"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield root
    subprocess.run(["umount", "--lazy", str(root)], check=True)


def test_a_disk_without_room_for_a_checkpoint_is_found(examine: Examine, full_disk: Path) -> None:
    outcome = examine("nothing", root=full_disk)
    assert outcome.code == 1
    (found,) = findings(outcome, "bad")
    assert found["check"] == "disk"
    assert found["text"].startswith(f"0.3 MB free at {full_disk}, one checkpoint takes ")


def test_pretraining_does_not_start_on_a_full_disk(examine: Examine, full_disk: Path) -> None:
    outcome = examine("nothing", script="pretrain", root=full_disk)
    assert outcome.codes == (2, 2)
    assert "error: the run was not started: " in outcome.stderr
    assert "MB free at" in outcome.stderr
    assert list(full_disk.iterdir()) == []


def test_pretraining_does_not_start_with_two_versions(examine: Examine, tmp_path: Path) -> None:
    outcome = examine("other_python", script="pretrain")
    assert outcome.codes == (2, 2)
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.stderr
    assert errors[0].startswith("error: the run was not started: broken: rank 1: python 3.9.1, ")
    assert not (tmp_path / "tiny").exists()


def test_pretraining_warns_of_variables_and_trains(examine: Examine) -> None:
    outcome = examine("other_variable", script="pretrain")
    assert outcome.codes == (0, 0), outcome.stderr
    assert outcome.stderr.count("warning: broken: rank 1: NCCL_ALGO is Ring") == 1


def test_pretraining_says_in_one_line_that_versions_are_not_certified(examine: Examine) -> None:
    outcome = examine("uncertified", ranks=1, script="pretrain")
    assert outcome.codes == (0,), outcome.stderr
    (line,) = [line for line in outcome.stderr.splitlines() if "has not been held to plain PyTorch" in line]
    assert "warning: torch " in line


SIZES = {
    "fp32_1": [],
    "fp32_0": ["deepspeed.zero_stage=0"],
    "bf16_1": ["deepspeed.precision=bf16"],
    "bf16_2": ["deepspeed.precision=bf16", "deepspeed.zero_stage=2"],
    "bf16_3": ["deepspeed.precision=bf16", "deepspeed.zero_stage=3"],
    "bf16_0": ["deepspeed.precision=bf16", "deepspeed.zero_stage=0"],
    "average": ["train.ema_half_life_tokens=512"],
    "muon": ["optimizer.name=muon"],
    "soap": ["optimizer.name=soap", "deepspeed.zero_stage=0"],
    "frozen": ["model.frozen_mlp=true"],
}


@pytest.fixture(scope="module")
def runs(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str], Run]:
    shape = ["model.hidden_size=128", "model.intermediate_size=384"]
    short = ["train.steps=1", "schedule.warmup=0steps", "train.eval_interval=null"]
    # Other modules name their runs likewise, and a worker has one folder for all
    found = train_matrix(
        tiny_config, {f"size_{name}": [*shape, *short, *overrides] for name, overrides in SIZES.items()}
    )
    return lambda name: found(f"size_{name}")


@pytest.mark.parametrize("name", SIZES)
def test_a_checkpoint_takes_what_was_expected(runs: Callable[[str], Run], name: str) -> None:
    folder = runs(name).folder
    saved = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    config = load_config(folder / "config.yaml", [])
    expected = checkpoint_bytes(config, plan_run(config).rows)
    assert expected < saved < 1.04 * expected, "names, scripts and checksums come on top"
