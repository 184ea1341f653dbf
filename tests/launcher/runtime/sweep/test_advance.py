"""How much of a task's share of a sweep is saved, as requeue.py asks before and after an attempt."""

import json
from pathlib import Path

import pytest

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.run.status_file import RESULT
from plumbline.launcher.runtime.sweep.advance import DIVERGED, ENDINGS, read_share
from plumbline.launcher.runtime.sweep.config import load_sweep


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"sweep": {"name": "grid", "root": str(tmp_path)}, "runs": ["a", "b", "c", "d"]}))
    return file


def save(plan: Path, run: str, *steps: int) -> Path:
    folder = plan.parent / "grid" / "runs" / run
    for step in steps:
        (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    return folder


def test_a_share_of_a_plan_counts_its_own_runs(plan: Path) -> None:
    assert read_share(None, plan, 0, 2).saved() == (0, 0)
    save(plan, "a", 5, 10)
    save(plan, "c", 7)
    save(plan, "b", 1000)
    assert read_share(None, plan, 0, 2).saved() == (0, 17)
    assert read_share(None, plan, 1, 2).saved() == (0, 1000)


def test_a_sweep_lies_for_its_jobs_where_it_lies_for_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("run: {name: base, root: /scratch/me}\n")
    file = tmp_path / "sweep.yaml"
    file.write_text("name: grid\nbase: base.yaml\ngrids: [{axes: {optimizer.lr: [0.1]}}]\n")
    assert read_share(file, None, 0, 1).folder == load_sweep(file).folder == Path("/scratch/me/sweeps/grid")


@pytest.mark.parametrize("name", [RESULT, DIVERGED])
def test_a_finished_run_counts_without_its_checkpoints(plan: Path, name: str) -> None:
    share = read_share(None, plan, 0, 2)
    run = save(plan, "a", 900)
    before = share.saved()
    (run / "checkpoints" / "step_00000900").rmdir()
    (run / name).touch()
    assert share.saved() == (1, 0) > before
    assert name in ENDINGS


def test_tasks_have_names_and_the_sweep_a_folder(plan: Path) -> None:
    share = read_share(None, plan, 1, 2)
    assert (share.name, share.folder) == ("1-of-2", plan.parent / "grid")


def test_a_sweep_submitted_by_hand_counts_all_its_runs(plan: Path) -> None:
    file = plan.with_name("sweep.yaml")
    file.write_text(f"{{name: grid, root: {plan.parent}, base: x.yaml}}")
    save(plan, "a", 5)
    save(plan, "b", 6)
    assert read_share(file, None, 1, 2).saved() == (0, 11)


def test_what_is_no_sweep_is_said(plan: Path) -> None:
    file = plan.with_name("sweep.yaml")
    file.write_text("{root: x}")
    with pytest.raises(ConfigError, match="name: not given"):
        read_share(file, None, 0, 1)
    for text in ("{", "{}", "[]"):
        plan.write_text(text)
        with pytest.raises(ConfigError, match=r"plan\.json: cannot be read as the plan"):
            read_share(None, plan, 0, 1)


def test_a_plan_that_the_disk_cannot_read_is_looked_at_again() -> None:
    """As `once_the_disk_is_back` does with an OSError alone. Linux reads nothing at the start of this file."""
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        read_share(None, Path("/proc/self/mem"), 0, 1)
