"""A cooldown from a checkpoint of another run: the same numbers as a run that was to end there from the start.

One parent of forty steps on two ranks, in bf16 with dropout, with checkpoints at 10 (warm-up), 20, 30 (peak)
and 40 (decayed).
A copy that stands at step 20 is what branches leave from, so it can be resumed afterwards.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import xxhash

from plumbline.launcher.runtime.checkpoint import branch
from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.checkpoint.resume import check_resume
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.checkpoint.tensors import shard_name
from plumbline.launcher.runtime.cluster.slurm import Request
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.network import StepTime, compute
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.folder import prepare_run_folder
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.run.starts import read_starts
from plumbline.launcher.runtime.train.submission import check as check_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Outcome, Pretrain, Run, Start
    from tests.distributed.conftest import TrainMatrix

SETTINGS = ["deepspeed.precision=bf16", "model.dropout=0.1", "checkpoint.interval=10", "checkpoint.keep_last=9"]
SETTINGS += ["schedule.warmup=12steps"]
PARENT = [*SETTINGS, "train.steps=40"]  # decays from step 32
DIRECT = [*SETTINGS, "train.steps=35", "schedule.decay=15steps"]
SHAPE = ["schedule.cooldown=one_minus_sqrt", "schedule.final_lr_fraction=0.1"]
TWO = World(0, 0, 2, torch.device("cpu"))


def numbers(run: Run, after: int = 0) -> list[dict[str, object]]:
    """Return the records after a step, without those of time."""
    return [record for record in run.numbers if record["step"] > after]


def content(folder: Path) -> dict[str, str]:
    """Checksum of every file."""
    return {str(p): xxhash.xxh3_64_hexdigest(p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def whole(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str], Run]:
    """Train the parent to its end, and a run that decays from step 20 to 35 as it was meant to from the start."""
    return train_matrix(tiny_config, {"branch_parent": PARENT, "branch_direct": [*DIRECT, *SHAPE]})


@pytest.fixture(scope="module")
def parent(whole: Callable[[str], Run]) -> Path:
    """Return a copy of the parent as if it had been interrupted at step 20."""
    copy = whole("branch_parent").folder.with_name("branch_interrupted")
    shutil.copytree(whole("branch_parent").folder, copy)
    for step in (30, 40):
        shutil.rmtree(copy / "checkpoints" / f"step_000000{step}")
    (copy / "result.json").unlink()
    return copy


def at(parent: Path, step: int) -> str:
    """Return what is typed to branch from a checkpoint, after `--config PARENT/config.yaml`."""
    return f"schedule.branch.checkpoint={parent / 'checkpoints' / f'step_{step:08d}'}"


def load(parent: Path, name: str, *overrides: str) -> Config:
    return load_config(parent / "config.yaml", [f"run.name={name}", f"run.root={parent.parent}", *overrides])


@dataclass(frozen=True)
class Branched:
    """Hold a branch that was killed in the middle and started again, to its end."""

    first_step: int
    resumed: Outcome
    parent_before: dict[str, str]


@pytest.fixture(scope="module")
def branched(parent: Path, start_pretrain: Start, run_pretrain: Pretrain, tiny_config: Path) -> Branched:
    before = content(parent)
    typed = [*PARENT, at(parent, 20), "schedule.branch.steps=15", *SHAPE, "checkpoint.interval=5"]
    job = start_pretrain(tiny_config, "branch", typed, ranks=2)
    job.wait_until(lambda: max(job.run.column("loss"), default=0) >= 26)
    job.kill()
    first = min(job.run.column("loss"))
    return Branched(first, run_pretrain(tiny_config, "branch", typed, ranks=2), before)


def test_a_branch_that_was_killed_equals_a_run_that_was_to_end_there(
    whole: Callable[[str], Run], parent: Path, branched: Branched
) -> None:
    outcome, run, direct = branched.resumed, branched.resumed.run, whole("branch_direct")
    assert outcome.code == 0, outcome.stderr
    assert branched.first_step == 21
    assert f"branch   from {parent / 'checkpoints' / 'step_00000020'}, 15 steps of cooldown" in outcome.stdout
    assert "peak to step 20, one_minus_sqrt decay to 0.1 of the peak at step 35" in outcome.stdout
    assert f"from {run.folder}" in outcome.stdout.partition("resuming after step ")[2].splitlines()[0], "not the parent"

    assert min(record["step"] for record in run.records) == 20, "the evaluation at the branch point comes first"
    assert list(run.column("loss")) == list(range(21, 36))
    found = numbers(run, after=20)
    assert found == numbers(direct, after=20)
    assert (found[0]["lr"], found[0]["tokens"]) == (4e-3, 21 * 8 * 32), "the parent's rate and position"
    results = [json.loads((each.folder / "result.json").read_text()) for each in (run, direct)]
    assert results[0] == results[1]
    assert "step_00000035" in run.checkpoints
    recorded = load_config(run.folder / "config.yaml", []).schedule.branch
    assert recorded is not None
    assert (recorded.checkpoint, recorded.from_step) == (str(parent / "checkpoints" / "step_00000020"), 20)


def test_a_branch_that_has_begun_needs_its_parent_no_more(
    whole: Callable[[str], Run], own_folder: Path, start_pretrain: Start, run_pretrain: Pretrain, tiny_config: Path
) -> None:
    """It is killed before the first checkpoint that `checkpoint.interval` asks for. The parent's was put aside."""
    kept = (own_folder / "checkpoints" / "step_00000020").rename(own_folder / "best_0007")
    begins = f"schedule.branch.checkpoint={kept}"
    typed = [*PARENT, begins, "schedule.branch.steps=15", *SHAPE, "checkpoint.interval=100"]
    job = start_pretrain(tiny_config, "orphan", typed, ranks=2)
    job.wait_until(lambda: max(job.run.column("loss"), default=0) >= 22)
    job.kill()
    assert job.run.checkpoints == ["latest", "step_00000020"]
    assert [start.step for start in read_starts(job.run.folder)] == [20]
    shutil.rmtree(kept)
    outcome = run_pretrain(tiny_config, "orphan", typed, ranks=2)
    assert outcome.code == 0, outcome.stderr
    assert numbers(outcome.run, after=20) == numbers(whole("branch_direct"), after=20)


def test_the_parent_is_not_written_to_and_resumes_as_if_nothing_had_branched(
    whole: Callable[[str], Run], parent: Path, branched: Branched, run_pretrain: Pretrain, tiny_config: Path
) -> None:
    assert content(parent) == branched.parent_before
    outcome = run_pretrain(tiny_config, parent.name, PARENT, ranks=2)
    assert outcome.code == 0, outcome.stderr
    assert "resuming after step 20 from" in outcome.stdout
    assert numbers(outcome.run) == numbers(whole("branch_parent"))


@pytest.fixture
def own_folder(whole: Callable[[str], Run], parent: Path, tmp_path: Path) -> Path:
    """Return the parent, alone in a folder, to damage."""
    shutil.copytree(whole("branch_parent").folder, tmp_path / "parent")
    return tmp_path / "parent"


def refusal(parent: Path, *overrides: str) -> str:
    """Return the one error before any process group."""
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        resolved(parent, *overrides, name="refused")
    assert not (parent.parent / "refused").exists()
    return str(caught.value)


def resolved(parent: Path, *overrides: str, name: str = "accepted") -> Config:
    """Return the configuration as training would get it."""
    config = branch.resolve(load(parent, name, *overrides))
    branch.check(config, open_inputs(config, TWO).fingerprints)
    return config


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (["schedule.branch.steps=7"], 7),
        ([f"schedule.branch.tokens={7 * 256}"], 7),
        ([f"schedule.branch.tokens={7 * 256 + 1}"], 8),
        (["schedule.branch.fraction=0.35"], 7),
        (["schedule.branch.fraction=0.36"], 8),
        (["schedule.branch.fraction=1.0e-9"], 1),
    ],
)
def test_the_length_in_steps_tokens_or_as_a_fraction_of_what_was_trained(
    own_folder: Path, length: list[str], steps: int
) -> None:
    config = resolved(own_folder, at(own_folder, 20), *length)
    assert (plan_run(config).first_step, plan_run(config).total_steps) == (20, 20 + steps)
    rate = plan_run(config).schedule
    assert (rate.decay_start, rate.end) == (20 * 256, (20 + steps) * 256)
    assert rate.factor(20 * 256) == 1.0
    assert rate.factor((20 + steps) * 256) == pytest.approx(0.0, abs=1e-12)
    assert "warm-up" not in rate.describe(), "a branch begins after its parent's"


def test_a_run_folder_means_its_newest_whole_checkpoint_and_a_restart_keeps_it(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = own_folder / "checkpoints"
    shutil.rmtree(root / "step_00000040")
    typed = [f"schedule.branch.checkpoint={own_folder}", "schedule.branch.steps=7"]
    assert plan_run(resolved(own_folder, *typed)).first_step == 30
    (root / "step_00000030" / "state.json").unlink()
    config = resolved(own_folder, *typed)
    assert plan_run(config).first_step == 20
    assert "step_00000030 cannot be used and is passed over: state.json is missing" in capsys.readouterr().err

    prepare_run_folder(config, open_inputs(config, TWO), TWO)
    shutil.copytree(root / "step_00000010", root / "step_00000031")  # the parent has gone on
    assert resolved(own_folder, *typed) == config
    shutil.rmtree(root / "step_00000020")
    remedy = r"name another one, and give the branch another run\.name: .* has those of steps 10, 30, 31"
    with pytest.raises(CheckpointError, match=rf"step_00000020: no whole checkpoint: .*manifest\.json.*; {remedy}"):
        resolved(own_folder, *typed)
    (config.run.folder / "checkpoints" / "step_00000025").mkdir(parents=True)
    assert resolved(own_folder, *typed) == config, "a branch that has saved needs its parent no more"


@pytest.mark.parametrize(
    ("step", "overrides", "parts"),
    [
        (40, [], ["step_00000040 is at step 40", "at its peak from step 12 to 32"]),
        (10, [], ["step_00000010 is at step 10", "at its peak from step 12 to 32"]),
        (20, ["optimizer.lr=0.002"], ["optimizer.lr: ", "a rate of 0.004 and the branch would start at 0.002"]),
        (20, ["train.steps=35"], ["train.steps = 35", "stay the parent's (40 and None)", "cooldown, at step 27"]),
        (20, ["train.steps=null", "train.tokens=99999"], ["train.tokens = 99999", "stay the parent's (40 and None)"]),
        (20, ["model.intermediate_size=160"], ["a branch continues its parent, so undo", "size: 96 -> 160"]),
        (20, ["parameterization.base_hidden_size=16"], ["parameterization.base_hidden_size: 32 -> 16"]),
        (20, ["data.global_batch_size=16"], ["data.global_batch_size: 8 -> 16"]),
        (20, ["run.seed=2"], ["run.seed: 1 -> 2"]),
        (20, ["schedule.branch.tokens=9"], ["steps = 7, tokens = 9: give one of them"]),
        (20, ["schedule.branch.steps=null"], ["how long? give steps or tokens or fraction"]),
        (
            25,
            [],
            ["step_00000025: no whole checkpoint", "manifest.json is missing", "has those of steps 10, 20, 30, 40"],
        ),
    ],
)
def test_what_would_not_continue_its_parent_is_refused(
    own_folder: Path, step: int, overrides: list[str], parts: list[str]
) -> None:
    error = refusal(own_folder, at(own_folder, step), "schedule.branch.steps=7", *overrides)
    assert all(part in error for part in parts), error


@pytest.mark.parametrize(
    ("file", "cut", "problem"),
    [
        ("state/rank_00001.safetensors", True, "expected"),
        ("config.yaml", False, "another checksum"),
        ("manifest.json", False, "manifest.json"),
    ],
)
def test_a_damaged_parent_is_refused(own_folder: Path, file: str, cut: bool, problem: str) -> None:
    path = own_folder / "checkpoints" / "step_00000020" / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] if cut else data[:50] + b"x" + data[51:])
    error = refusal(own_folder, at(own_folder, 20), "schedule.branch.steps=7")
    assert "step_00000020: no whole checkpoint: " in error
    assert problem in error
    for folder in (own_folder / "checkpoints").glob("step_*"):
        (folder / "manifest.json").unlink()
    error = refusal(own_folder, f"schedule.branch.checkpoint={own_folder}", "schedule.branch.steps=7")
    assert f"{own_folder}: this run has no whole checkpoint" in error


def test_a_checkpoint_of_another_format_is_refused_not_passed_over(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
    error = refusal(own_folder, f"schedule.branch.checkpoint={own_folder}", "schedule.branch.steps=7")
    assert f"checkpoint format {checkpoint.FORMAT - 1}, this version reads {checkpoint.FORMAT}" in error


def test_a_flipped_byte_is_found_before_the_engine_is_built(own_folder: Path, world: World) -> None:
    config = resolved(own_folder, at(own_folder, 20), "schedule.branch.steps=7")
    assert branch.start(config, world) == own_folder / "checkpoints" / "step_00000020"
    assert branch.start(load(own_folder, "plain"), world) is None
    path = own_folder / "checkpoints" / "step_00000020" / shard_name(1)
    data = path.read_bytes()
    path.write_bytes(data[:99] + bytes([data[99] ^ 1]) + data[100:])
    assert resolved(own_folder, at(own_folder, 20), "schedule.branch.steps=7") == config
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors has another checksum"):
        branch.start(config, world)


def test_a_run_folder_is_of_one_run(own_folder: Path) -> None:
    typed = [at(own_folder, 20), "schedule.branch.steps=7"]
    with pytest.raises(ConfigError, match=r"run\.name = parent: .*parent is not a branch; give this one another"):
        branch.resolve(load(own_folder, "parent", *typed))

    config = resolved(own_folder, *typed)
    prepare_run_folder(config, open_inputs(config, TWO), TWO)
    for other, line in (
        ([at(own_folder, 20), "schedule.branch.steps=8"], "schedule.branch.steps: 7 -> 8"),
        ([at(own_folder, 30), "schedule.branch.steps=7"], "schedule.branch.checkpoint: "),
    ):
        with pytest.raises(ConfigError, match=r"accepted is another branch; give this one") as caught:
            branch.resolve(load(own_folder, "accepted", *other))
        assert line in str(caught.value)
    plain = load(own_folder, "accepted")
    folder = own_folder / "checkpoints" / "step_00000020"
    with pytest.raises(CheckpointError, match=r"schedule\.branch\.from_step: 20 -> None"):
        check_resume(config, plain, open_inputs(plain, TWO).fingerprints, folder)


def test_a_branch_of_a_branch_is_refused(branched: Branched) -> None:
    """All that it has saved lies in its cooldown."""
    folder = branched.resumed.run.folder
    error = refusal(folder, at(folder, 25), "schedule.branch.steps=7")
    assert "step_00000025 is at step 25, and the rate of its run is at its peak from step 12 to 20" in error


def test_a_longer_parent_may_be_described_as_it_was_or_as_it_is(own_folder: Path) -> None:
    file = own_folder / "config.yaml"
    file.write_text(file.read_text().replace("steps: 40", "steps: 80"))
    for steps in (40, 80):
        resolved(own_folder, at(own_folder, 20), "schedule.branch.steps=7", f"train.steps={steps}")
    assert "stay the parent's" in refusal(own_folder, at(own_folder, 20), "schedule.branch.steps=7", "train.steps=60")


def test_the_rate_under_a_horizon_is_the_one_compared(own_folder: Path) -> None:
    """A longer parent has another rate for the same optimizer.lr; the branch keeps its parent's horizon."""
    horizon = ["horizon.rule=power_law", "horizon.base_batch_tokens=256", "horizon.base_tokens=1024"]
    error = refusal(own_folder, at(own_folder, 20), "schedule.branch.steps=7", *horizon)
    factor = (40 * 256 / 1024) ** -0.32
    assert f"a rate of 0.004 and the branch would start at {0.004 * factor:g}" in error
    undone = f"optimizer.lr={0.004 / factor!r}"
    resolved(own_folder, at(own_folder, 20), "schedule.branch.steps=7", *horizon, undone)


def test_a_plan_counts_the_branch_alone_and_a_job_is_checked_before_the_queue(own_folder: Path) -> None:
    config = resolved(own_folder, at(own_folder, 20), "schedule.branch.steps=7")
    work = compute(config, plan_run(config), StepTime(sent_bytes=1.0, compute_seconds=3600.0, network_seconds=1800.0))
    assert (work.steps, work.tokens, work.hours, work.network_hours) == (7, 7 * 256, 7.0, 3.5)
    job = Request(nodes=2, tasks_per_node=1)
    check_job(load(own_folder, "job", at(own_folder, 20), "schedule.branch.steps=7"), job)
    with pytest.raises(CheckpointError, match="at its peak from step 12 to 32"):
        check_job(load(own_folder, "job", at(own_folder, 40), "schedule.branch.steps=7"), job)


def test_the_command_says_it_in_one_line(own_folder: Path, start: Start) -> None:
    """One of two ranks: it is refused before they meet."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    words = ["run.name=refused", f"run.root={own_folder.parent}", at(own_folder, 40), "schedule.branch.steps=7"]
    arguments = ["--config", own_folder / "config.yaml", *words]
    outcome = start("launcher/pretrain.py", arguments, own_folder, launcher="python", env=env).wait()
    assert outcome.code == 2, outcome.stderr
    assert outcome.stderr.startswith(f"error: {own_folder / 'checkpoints' / 'step_00000040'} is at step 40")
    assert len(outcome.stderr.splitlines()) == 1
    assert not (own_folder.parent / "refused").exists()
