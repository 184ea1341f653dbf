"""A sweep from the command line: trained once, whatever happens to it.

Most tests read one sweep of three runs, of which one diverges and one fails the first time. The others stop a sweep in
the middle, by killing its worker and by asking it to stop.
"""

import json
import re
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from plumbline.launcher.runtime.checkpoint import publishing, store
from plumbline.launcher.runtime.config.load import as_yaml, save_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.run.status import RunStatus
from plumbline.launcher.runtime.run.status_file import read_attempts, read_status
from plumbline.launcher.runtime.sweep import worker
from plumbline.launcher.runtime.sweep.plan import Plan, make_plan
from plumbline.launcher.runtime.sweep.training import train
from plumbline.launcher.runtime.sweep.worker import run_cell, why_failed
from plumbline.launcher.runtime.system.exit_codes import INTERRUPTED
from plumbline.launcher.runtime.system.signals import StopRequest
from tests.conftest import Command, Job, Outcome, Pretrain, Run, Start, written
from tests.launcher.runtime.run.test_lock import held_elsewhere

SETTINGS: dict[str, Any] = {
    "train.eval_interval": None,
    "checkpoint.interval": None,
    "metrics.diagnostics_interval": 10,
}
RULES = {
    "sp": {"parameterization.rule": "sp"},
    # As wide and deep as its base, so it is sp
    "completep": {"parameterization.base_hidden_size": 64, "parameterization.base_num_hidden_layers": 2},
}
LONG = 200  # steps, enough for a signal to arrive among them
AXES = {"rule": RULES, "optimizer.lr": [0.004, 0.008, 1e38]}


def write(file: Path, base: Path, steps: int, seeds: list[int], axes: dict[str, Any]) -> Path:
    sweep: dict[str, Any] = {
        "name": "sweep",
        "root": str(file.parent),
        "base": str(base),
        "seeds": seeds,
        "grids": [{"axes": axes}],
    }
    file.write_text(yaml.safe_dump({**sweep, "set": {**SETTINGS, "train.steps": steps}}, sort_keys=False))
    return file


Sweep = Callable[..., Job]


@pytest.fixture(scope="module")
def sweep(start: Start) -> Sweep:
    """Start launcher/sweep.py on a sweep's file."""

    def begin(file: Path, *options: str) -> Job:
        return start("launcher/sweep.py", ["--config", file, *options], file.parent, launcher="python")

    return begin


@pytest.fixture(scope="module")
def file(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sweep") / "sweep.yaml", tiny_config, 20, [1], AXES)


@pytest.fixture(scope="module")
def plan(file: Path) -> Plan:
    return make_plan(file, [])


def folder(plan: Plan, lr: float) -> Path:
    """Return the run folder of the cells with this learning rate."""
    (found,) = {cell.config.run.folder for cell in plan.cells if cell.labels["optimizer.lr"] == lr}
    return found


@pytest.fixture(scope="module")
def first(plan: Plan, file: Path, sweep: Sweep) -> Outcome:
    """Run the sweep, with a damaged checkpoint where one of its runs wants to begin."""
    (folder(plan, 0.008) / "checkpoints" / "step_00000001").mkdir(parents=True)
    return sweep(file, "--workers", "2", "--json").wait()


@pytest.fixture(scope="module")
def before(first: Outcome, plan: Plan) -> dict[Path, int]:
    """Return when each file of the finished runs was written."""
    folders = [folder(plan, 0.004), folder(plan, 1e38)]
    return {path: time for run in folders for path, time in written(run).items()}


@pytest.fixture(scope="module")
def second(before: dict[Path, int], plan: Plan, file: Path, sweep: Sweep) -> Outcome:
    """Run the same command, with the damage repaired and one worker for the one run that is left."""
    (folder(plan, 0.008) / "checkpoints" / "step_00000001").rmdir()
    return sweep(file, "--workers", "1", "--json").wait()


def rows(plan: Plan) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (plan.sweep.folder / "results.jsonl").read_text().splitlines()]


def test_a_sweep_says_what_it_will_do_and_how_it_ended(first: Outcome, plan: Plan) -> None:
    assert first.code == 1, first.stderr
    assert "6 cells, 3 distinct runs; of 3 0 are finished, 3 to do with 2 worker(s)" in first.stderr
    assert "failed: rule=sp optimizer.lr=0.008 seed=1: CheckpointError" in first.stderr
    assert "no whole checkpoint among 1" in first.stderr
    summary = json.loads(first.stdout)
    assert summary["runs"] == {"finished": 1, "failed": 1, "diverged": 1}
    assert (summary["cells"], summary["kind"]) == (6, "grid")
    assert "Traceback" in (folder(plan, 0.008) / "error.txt").read_text()


def test_a_dry_run_trains_nothing(tiny_config: Path, tmp_path: Path, sweep: Sweep) -> None:
    other = write(tmp_path / "sweep.yaml", tiny_config, 20, [1], AXES)
    outcome = sweep(other, "--dry-run").wait()
    assert outcome.code == 0, outcome.stderr
    assert "of 3 0 are finished, 3 to do" in outcome.stderr
    assert not (tmp_path / "sweep").exists()
    outcome = sweep(other, "--time", "1:00:00").wait()
    assert outcome.code == 2
    assert "--time is for a Slurm job: add --slurm, or leave it out" in outcome.stderr


def test_a_run_folder_that_is_a_file_is_refused_before_any_run(
    tiny_config: Path, tmp_path: Path, stop: StopRequest
) -> None:
    plan = make_plan(write(tmp_path / "sweep.yaml", tiny_config, 20, [1], AXES), [])
    last = plan.runs[-1].config.run.folder
    last.parent.mkdir(parents=True)
    last.touch()
    with pytest.raises(ValueError, match=f"^run folder {last}: {last} is not a folder; move it away"):
        train(plan, (0, 1), 1, stop)
    assert list(last.parent.iterdir()) == [last]


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="a tracker that is not installed is needed")
def test_trackers_that_a_job_of_this_environment_cannot_use_are_a_warning(
    tiny_config: Path, tmp_path: Path, sweep: Sweep
) -> None:
    file = write(tmp_path / "sweep.yaml", tiny_config, 20, [1], AXES)
    outcome = sweep(file, "--slurm", "--dry-run", "metrics.trackers=[mlflow]").wait()
    assert outcome.code == 0, outcome.stderr
    assert "warning: metrics.trackers = [mlflow]: mlflow cannot be imported: " in outcome.stderr


def test_failed_cells_are_tried_again_and_finished_ones_are_not(
    second: Outcome, before: dict[Path, int], plan: Plan
) -> None:
    assert second.code == 0, second.stderr
    assert "of 3 2 are finished, 1 to do with 1 worker(s)" in second.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    summary = json.loads(second.stdout)
    assert summary["runs"] == {"finished": 2, "diverged": 1}
    assert json.loads((plan.sweep.folder / "summary.json").read_text()) == summary
    assert not (folder(plan, 0.008) / "error.txt").exists()


def test_the_results_are_those_of_the_runs(second: Outcome, plan: Plan) -> None:
    found = rows(plan)
    assert [row["labels"] for row in found] == [cell.labels for cell in plan.cells]
    for row in found:
        run = Run(Path(row["run"]))
        assert row["lr"] == row["labels"]["optimizer.lr"]
        assert (row["hidden_size"], row["num_hidden_layers"], row["seed"]) == (64, 2, 1)
        if row["lr"] == 1e38:
            assert (row["status"], row["diverged"], row["loss"], row["train_loss"]) == ("diverged", True, None, None)
            assert row["tokens"] < 20 * 8 * 32
            continue
        losses = list(run.column("loss").values())
        assert row["loss"] == json.loads((run.folder / "result.json").read_text())["eval/email/loss"]
        assert row["train_loss"] == pytest.approx((losses[-1] + losses[-2]) / 2)
        assert (row["status"], row["diverged"], row["tokens"]) == ("finished", False, 20 * 8 * 32)
        assert row["seconds"] > 0
        seen = [record for record in run.records if "stream/kurt/head" in record]
        kurt = [[record[f"stream/kurt/{place}"] for place in ("00", "01", "head")] for record in seen]
        assert [record["step"] for record in seen] == [10, 20]
        assert row["outliers"]["kurt_peak"] == max(map(max, kurt))
        assert row["outliers"]["kurt"] == pytest.approx(sum(kurt[-1]) / 3)
        assert row["outliers"]["corr"] == seen[-1]["stream/corr_mean/head"]
        assert row["outliers"]["w8a8_delta"] == row["result"]["eval/email/w8a8_delta"]
        assert run.checkpoints == [], "deleted with the run's end"


def test_cells_of_two_rules_that_are_one_run_report_it_both(second: Outcome, plan: Plan) -> None:
    sp, completep = rows(plan)[:3], rows(plan)[3:]
    assert [{**row, "labels": None} for row in sp] != [{**row, "labels": None} for row in completep], "their bases"
    for key in ("signature", "loss", "status", "seconds"):
        assert [row[key] for row in sp] == [row[key] for row in completep]
    assert len(list((plan.sweep.folder / "runs").iterdir())) == 3


def test_the_status_of_a_run_says_which_cells_it_is_and_how_it_ended(
    second: Outcome, plan: Plan, command: Command
) -> None:
    found = json.loads(command("status", plan.sweep.folder, "--json").stdout)["runs"]
    ends = {run["cells"][0]: (run["state"], run["starts"], run["status"]["step"]) for run in found}
    assert ends["rule=sp optimizer.lr=0.004 seed=1"] == ("complete", 1, 20)
    assert ends["rule=sp optimizer.lr=0.008 seed=1"] == ("complete", 2, 20), "it failed the first time"
    assert ends["rule=sp optimizer.lr=1e+38 seed=1"][:2] == ("diverged", 1)
    for run in found:
        assert run["cells"][1] == run["cells"][0].replace("sp", "completep"), "two rules share each run"
    lines = command("status", plan.sweep.folder).stdout.splitlines()
    assert [len(re.findall(r"^\w{16}: rule=sp optimizer\.lr=\S+ seed=1  ", line)) for line in lines] == [0, 1, 1, 1]


def test_the_best_point_comes_first_and_one_that_diverged_last(second: Outcome) -> None:
    points = json.loads(second.stdout)["grid"]["points"]
    losses = [point["loss"] for point in points]
    assert losses[:4] == sorted(losses[:4])
    assert [point["statuses"] for point in points[4:]] == [["diverged"], ["diverged"]]


def test_a_summary_is_made_of_what_is_there(second: Outcome, plan: Plan, file: Path, sweep: Sweep) -> None:
    whole = (plan.sweep.folder / "results.jsonl").read_text()
    (plan.sweep.folder / "results.jsonl").unlink()
    again = sweep(file, "--summarize", "--json").wait()
    assert (again.code, again.stdout) == (0, second.stdout)
    assert (plan.sweep.folder / "results.jsonl").read_text() == whole
    assert "to do" not in again.stderr
    for option, code, said in (("--summarize", 2, "error"), ("--dry-run", 0, "warning")):
        other = sweep(file, option, "train.steps=7").wait()
        assert other.code == code
        assert re.search(rf"{said}: \S*/sweep holds \d finished runs, none of them of these cells", other.stderr)
    assert (plan.sweep.folder / "results.jsonl").read_text() == whole


@pytest.fixture(scope="module")
def interrupted(
    tiny_config: Path, tmp_path_factory: pytest.TempPathFactory, sweep: Sweep
) -> tuple[Plan, Outcome, Outcome, int]:
    """Sweep two runs by one worker: killed in the first run, asked to stop in the second, then run again."""
    file = write(
        tmp_path_factory.mktemp("interrupted") / "sweep.yaml", tiny_config, LONG, [1, 2], {"optimizer.lr": [0.004]}
    )
    plan = make_plan(file, [])
    runs = [Run(cell.config.run.folder) for cell in plan.runs]
    job = sweep(file, "--workers", "1")
    job.wait_until(lambda: len(runs[0].records) >= 3)
    children = psutil.Process(job.processes[0].pid).children(recursive=True)
    (worker,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    worker.kill()
    job.wait_until(lambda: len(runs[1].records) >= 3)
    job.processes[0].send_signal(signal.SIGUSR1)
    stopped = job.wait()
    (saved,) = [name for name in runs[1].checkpoints if name.startswith("step_")]
    assert "the worker that trained it died: SIGKILL" in (runs[0].folder / "error.txt").read_text()
    return plan, stopped, sweep(file, "--workers", "1", "--json").wait(), int(saved.removeprefix("step_"))


def test_a_killed_worker_is_a_failed_cell_and_is_replaced(interrupted: tuple[Plan, Outcome, Outcome, int]) -> None:
    plan, stopped, _, _ = interrupted
    assert f"failed: {plan.runs[0]}" in stopped.stderr
    assert f"stopped: {plan.runs[1]}" in stopped.stderr


def test_a_second_interrupt_ends_a_sweep_and_its_workers(tiny_config: Path, tmp_path: Path, sweep: Sweep) -> None:
    file = write(tmp_path / "sweep.yaml", tiny_config, LONG, [1], {"optimizer.lr": [0.004]})
    slow = "data.global_batch_size=2048"  # steps of seconds
    (cell,) = make_plan(file, [slow]).runs
    job = sweep(file, "--workers", "1", slow)
    job.wait_until(lambda: (found := read_status(cell.config.run.folder)) is not None and found.state == "training")
    children = psutil.Process(job.processes[0].pid).children(recursive=True)
    for _ in range(2):
        job.processes[0].send_signal(signal.SIGINT)
        time.sleep(0.5)  # two that come together count as one
    outcome = job.wait()
    assert outcome.code == INTERRUPTED, outcome.stderr
    assert "Traceback" not in outcome.stderr
    _, left = psutil.wait_procs(children, timeout=2)
    assert not left, "else they train on until they notice"


def test_asked_to_stop_a_sweep_saves_and_goes_on_next_time(
    interrupted: tuple[Plan, Outcome, Outcome, int], run_pretrain: Pretrain, tiny_config: Path
) -> None:
    plan, stopped, again, saved = interrupted
    assert stopped.code == 85, stopped.stderr
    assert "stopped on request" in stopped.stderr
    assert 3 <= saved < LONG
    assert again.code == 0, again.stderr
    assert json.loads(again.stdout)["runs"] == {"finished": 2}

    resumed = Run(plan.runs[1].config.run.folder)
    assert f"resuming after step {saved}" in (resumed.folder / "log.txt").read_text()
    values = {**SETTINGS, "train.steps": LONG, "run.seed": plan.runs[1].config.run.seed}
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    alone = run_pretrain(tiny_config, "alone", overrides, launcher="python")
    assert alone.code == 0, alone.stderr
    assert resumed.column("loss") == alone.run.column("loss"), "a cell is the run that pretrain.py makes, to the bit"


def never(config: Config, inputs: Inputs, world: World, stop: StopRequest, status: RunStatus) -> bool:
    raise AssertionError("trained")


@pytest.fixture
def cell(plan: Plan, tmp_path: Path) -> Config:
    """Return a cell that was not begun."""
    run = plan.cells[0].config.run.model_copy(update={"root": str(tmp_path), "name": "cell"})
    return plan.cells[0].config.model_copy(update={"run": run})


WORLD = World(0, 0, 1, torch.device("cpu"))


def test_a_run_that_another_process_is_at_is_left_to_it(cell: Config, stop: StopRequest) -> None:
    with held_elsewhere(cell.run.folder):
        assert run_cell(cell, WORLD, stop, never, False) == "elsewhere"
    assert run_cell(cell, WORLD, stop, never, False) == "failed", "the lock ends with its holder"


def test_a_run_whose_lock_a_dead_attempt_has_kept_is_taken_over(
    cell: Config, stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LEASE_SECONDS", 0.5)
    cell.run.folder.mkdir(parents=True)
    (cell.run.folder / "status.json").touch()
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with held_elsewhere(cell.run.folder):
        assert run_cell(cell, WORLD, stop, never, False) == "elsewhere", "it is of this attempt"
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert run_cell(cell, WORLD, stop, never, False) == "failed"
    with held_elsewhere(cell.run.folder, pulse=cell.run.folder / "status.json"):
        monkeypatch.setattr(worker, "LEASE_SECONDS", 3.0)  # in which it writes, however busy the machine is
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        assert run_cell(cell, WORLD, stop, never, False) == "elsewhere", "it lives"


def test_a_sweep_with_a_run_elsewhere_does_not_say_that_all_is_finished(
    tiny_config: Path, tmp_path: Path, sweep: Sweep
) -> None:
    other = write(tmp_path / "sweep.yaml", tiny_config, 20, [1], {"optimizer.lr": [0.004]})
    (run,) = make_plan(other, []).runs
    with held_elsewhere(run.config.run.folder):
        outcome = sweep(other).wait()
    assert outcome.code == 4, outcome.stderr
    assert "1 run(s) are not finished: other processes are at them" in outcome.stderr


def test_a_run_that_another_process_finished_is_not_trained_again(cell: Config, stop: StopRequest) -> None:
    cell.run.folder.mkdir(parents=True)
    (cell.run.folder / "diverged.json").write_text("{}")
    assert run_cell(cell, WORLD, stop, never, False) == "diverged"


def test_a_run_goes_on_under_the_rule_it_was_begun_with(cell: Config, plan: Plan, stop: StopRequest) -> None:
    """Its checkpoint would refuse another name for the same numbers."""
    begun = plan.cells[-1].config
    assert begun.parameterization != cell.parameterization
    staging = publishing.staging_folder(cell.run.folder / "checkpoints", step=3)
    cell.run.folder.mkdir(parents=True)
    publishing.make_room(staging)
    files = publishing.write_files({"config.yaml": as_yaml(begun)}, staging, store.silent)
    saved = publishing.publish(staging, {"step": 3}, files)
    seen = []

    def see(config: Config, inputs: Inputs, world: World, stop: StopRequest, status: RunStatus) -> bool:
        seen.append(config)
        return False

    assert run_cell(cell, WORLD, stop, see, False) == "stopped"
    assert seen == [cell.model_copy(update={"parameterization": begun.parameterization})]
    assert saved.exists()


def succeed(config: Config, inputs: Inputs, world: World, stop: StopRequest, status: RunStatus) -> bool:
    return True


@pytest.mark.parametrize("keep", [True, False])
def test_checkpoints_of_a_finished_run_stay_where_they_are_asked_for(
    cell: Config, stop: StopRequest, keep: bool
) -> None:
    saved = cell.run.folder / "checkpoints" / "step_00000003"
    saved.mkdir(parents=True)
    save_config(cell, saved / "config.yaml")
    assert run_cell(cell, WORLD, stop, succeed, keep) == "finished"
    assert saved.exists() is keep


def test_the_time_of_a_run_begins_when_its_worker_takes_it(cell: Config, stop: StopRequest) -> None:
    before = time.time()
    run_cell(cell, WORLD, stop, succeed, False)
    (attempt,) = read_attempts(cell.run.folder)
    assert attempt.queued == attempt.start >= before - 0.001, "not with the worker, which had others before it"
    assert (attempt.exit_code, attempt.why) == (0, "complete")


def test_a_failed_run_that_another_process_has_just_begun_again_has_no_reason_left(cell: Config) -> None:
    cell.run.folder.mkdir()
    (cell.run.folder / "error.txt").write_text("ValueError: no such thing\n\nTraceback\n")
    assert why_failed(cell) == "ValueError: no such thing"
    (cell.run.folder / "error.txt").unlink()
    assert why_failed(cell) == "another process is trying it again"
