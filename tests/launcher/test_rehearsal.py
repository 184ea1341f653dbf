"""A run is looked at before it begins, which leaves no trace, and tells afterwards how it was started each time."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.run.lock import hold
from plumbline.launcher.runtime.system.exit_codes import REQUEUE
from tests.conftest import Outcome, Pretrain, written

SHORT = ["train.steps=4", "checkpoint.interval=2", "train.eval_interval=4", "train.eval_batches=1"]


@pytest.fixture(scope="module")
def stopped(run_pretrain: Pretrain, tiny_config: Path) -> Path:
    """Return the folder of a run that is complete at its second step."""
    outcome = run_pretrain(tiny_config, "stopped", [*SHORT, "train.steps=2"], launcher="python")
    assert outcome.code == 0, outcome.stderr
    return Path(outcome.run.folder)


def copy_of(stopped: Path, name: str) -> Path:
    shutil.copytree(stopped, stopped.with_name(name))
    return stopped.with_name(name)


def starts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text(encoding="utf-8").splitlines()]


def dry(run_pretrain: Pretrain, config: Path, name: str, overrides: Sequence[str] = (), **options: Any) -> Outcome:
    outcome: Outcome = run_pretrain(config, name, [*SHORT, *overrides, "--dry-run"], **options)
    return outcome


def test_the_printed_configuration_is_the_whole_one_and_can_be_read_back(
    run_pretrain: Pretrain, tiny_config: Path, tmp_path: Path
) -> None:
    outcome = run_pretrain(tiny_config, "printed", ["optimizer.lr=0.003", "--print-config"], ranks=2)
    assert outcome.code == 0, outcome.stderr
    file = tmp_path / "printed.yaml"
    file.write_text(outcome.stdout, encoding="utf-8")
    root = f"run.root={tiny_config.parent / 'runs'}"
    assert load_config(file, []) == load_config(tiny_config, [root, "run.name=printed", "optimizer.lr=0.003"])
    assert yaml.safe_load(outcome.stdout)["model"]["vocab_size"] == 257
    assert not outcome.run.folder.exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dry_run_shows_the_first_batch_and_makes_no_folder(
    run_pretrain: Pretrain, tiny_config: Path, ranks: int
) -> None:
    outcome = dry(run_pretrain, tiny_config, "dry", ranks=ranks)
    assert outcome.code == 0, outcome.stderr
    assert f"step 1 would train on these; 4 of the {8 // ranks} samples of rank 0:" in outcome.stdout
    assert outcome.stdout.count("\nsample ") == 4
    assert outcome.stdout.count("32 tokens\n  | ") == 4, "each is decoded"
    assert "dry run: nothing was trained and nothing written" in outcome.stdout
    assert not outcome.run.folder.exists()


def test_a_dry_run_says_from_where_a_run_would_go_on_and_what_has_changed(
    run_pretrain: Pretrain, tiny_config: Path, stopped: Path
) -> None:
    before = written(stopped), (stopped / "attempts.jsonl").read_text(encoding="utf-8")
    outcome = dry(run_pretrain, tiny_config, "stopped", ["optimizer.lr=0.002"], launcher="python")
    assert outcome.code == 0, outcome.stderr
    assert f"would resume after step 2 from {stopped}/checkpoints/step_00000002\n" in outcome.stdout
    assert "changed  optimizer.lr: 0.004 -> 0.002\n" in outcome.stdout
    assert "step 3 would train on these" in outcome.stdout
    assert (written(stopped), (stopped / "attempts.jsonl").read_text(encoding="utf-8")) == before


def test_a_dry_run_is_refused_as_the_run_would_be_and_leaves_no_trace(
    run_pretrain: Pretrain, tiny_config: Path, stopped: Path
) -> None:
    folder = copy_of(stopped, "refused")
    (folder / "result.json").unlink()
    attempts = folder / "attempts.jsonl"
    attempt = json.loads(attempts.read_text(encoding="utf-8"))
    attempts.write_text(json.dumps({**attempt, "exit_code": REQUEUE}), encoding="utf-8")  # a complete run hears nothing
    before = written(folder), (folder / "status.json").read_text(encoding="utf-8")
    outcome = dry(run_pretrain, tiny_config, "refused", ["run.seed=3"], launcher="python")
    assert (outcome.code, "run.seed: 1 -> 3" in outcome.stderr) == (2, True), outcome.stderr
    missing = dry(run_pretrain, tiny_config, "refused", ["data.micro_batch_size=0"], launcher="python")
    assert (missing.code, "data.micro_batch_size" in missing.stderr) == (2, True), missing.stderr
    with hold(folder):
        held = dry(run_pretrain, tiny_config, "refused", launcher="python")
    assert held.code == 2
    assert f"{folder} is being trained by process {os.getpid()} on host " in held.stderr
    assert (written(folder), (folder / "status.json").read_text(encoding="utf-8")) == before


def test_each_start_is_listed_with_what_changed_since_the_one_before(
    run_pretrain: Pretrain, tiny_config: Path, stopped: Path
) -> None:
    folder = copy_of(stopped, "listed")
    (line,) = starts(folder)
    assert (line["step"], line["changes"], line["world_size"]) == (0, None, 1)
    assert line["command"][1:] == ["--config", str(tiny_config), f"run.root={folder.parent}", "run.name=stopped",
                                   *SHORT, "train.steps=2"]  # fmt: skip
    facts = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    assert {key: line[key] for key in ("host", "python", "packages", "git_commit")} == {
        key: facts[key] for key in ("host", "python", "packages", "git_commit")
    }
    facts["packages"]["torch"] = "1.0"
    (folder / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    outcome = run_pretrain(tiny_config, "listed", [*SHORT, "optimizer.lr=0.002"], ranks=2)
    assert outcome.code == 0, outcome.stderr
    assert "changed  optimizer.lr: 0.004 -> 0.002\n" in outcome.stdout
    first, second = starts(folder)
    assert first == line
    assert (second["step"], second["world_size"]) == (2, 2)
    assert second["changes"] == {
        "run.name": ["stopped", "listed"],
        "optimizer.lr": [0.004, 0.002],
        "train.steps": [2, 4],
        "world_size": [1, 2],
        "packages.torch": ["1.0", second["packages"]["torch"]],
    }


def test_a_damaged_list_of_starts_is_put_aside(run_pretrain: Pretrain, tiny_config: Path, stopped: Path) -> None:
    folder = copy_of(stopped, "damaged")
    (folder / "starts.jsonl").write_text("nonsense\n{}\n", encoding="utf-8")
    outcome = run_pretrain(tiny_config, "damaged", SHORT, launcher="python")
    assert outcome.code == 0, outcome.stderr
    assert "kept as starts.jsonl.damaged" in outcome.stderr
    assert (folder / "starts.jsonl.damaged").read_text(encoding="utf-8") == "nonsense\n{}\n"
    assert [line["step"] for line in starts(folder)] == [2]
