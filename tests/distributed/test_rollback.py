"""A run that goes back to a checkpoint and leaves out what broke it is, to the last bit, one that never read it."""

from __future__ import annotations

import errno
import functools
import json
import math
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.data.skipped import SkippedData
from plumbline.launcher.runtime.checkpoint import branch
from plumbline.launcher.runtime.checkpoint.resume import read_state
from plumbline.launcher.runtime.checkpoint.store import UnsavedError
from plumbline.launcher.runtime.checkpoint.tensors import shard_name
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.inspection.seen import SeenRun
from plumbline.launcher.runtime.run.chain import CHAIN, noted_checkpoint
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.run.interventions import INTERVENTIONS, read_interventions
from plumbline.launcher.runtime.run.ledger import total
from plumbline.launcher.runtime.run.status_file import read_attempts
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train import loop, rollback
from plumbline.launcher.runtime.train.guards.guard import TrainingError
from plumbline.launcher.runtime.train.train import train
from plumbline.model.objectives.next_token import NextToken
from tests.conftest import Run
from tests.distributed.poisoned import forward_with

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from plumbline.launcher.runtime.config.schema import Config
    from plumbline.launcher.runtime.ranks.world import World
    from tests.conftest import Command, Job, Start
    from tests.distributed.poisoned import Poison

STEPS = 32
OVERRIDES = [
    f"train.steps={STEPS}",
    "train.eval_interval=8",
    "train.ema_half_life_tokens=2000",
    "model.dropout=0.1",
    "deepspeed.precision=bf16",
    "checkpoint.interval=5",
    "checkpoint.keep_last=9",
    "metrics.diagnostics_interval=6",
    "guards.non_finite.max_skipped=2",
    "guards.gradient_spike={action: roll_back, window: 8, look_back: 4}",
]
# Steps are of 8 samples: the first makes updates 13 and 14 infinite, the second, of what is left, the gradient of 23
INFINITE, STEEP = (96, 112, "inf"), (192, 200, 1000)


@pytest.fixture(scope="module")
def begin(start: Start, tiny_config: Path) -> Callable[..., Job]:
    """Start a run on two ranks: (name, poison) -> Job."""

    def run(name: str, *poison: Any, ranks: int = 2, changes: tuple[str, ...] = ()) -> Job:
        root = tiny_config.parent / "runs"
        arguments = ["--config", tiny_config, f"run.root={root}", f"run.name={name}", *OVERRIDES, *changes]
        env = {"POISON": json.dumps(poison)}
        return start("tests/distributed/poisoned.py", arguments, root / name, ranks=ranks, env=env)

    return run


@pytest.fixture(scope="module")
def whole(begin: Callable[..., Job]) -> Callable[[], Run]:
    """Return the run that went back twice and was not disturbed otherwise."""

    @functools.cache
    def run() -> Run:
        outcome = begin("whole", INFINITE, STEEP).wait()
        assert outcome.code == 0, outcome.stderr
        return outcome.run

    return run


def steps_of_chain(run: Run) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run.folder / CHAIN).read_text().splitlines()]
    return [{key: line[key] for key in ("step", "samples", "loss", "grad_norm")} for line in lines if "step" in line]


def assert_same(found: Run, expected: Run) -> None:
    assert found.numbers == expected.numbers
    last = f"checkpoints/step_{STEPS:08d}"
    for file in (*map(shard_name, range(2)), "state.json"):
        assert (found.folder / last / file).read_bytes() == (expected.folder / last / file).read_bytes()


def test_it_goes_back_and_leaves_out_what_broke_it(whole: Callable[[], Run]) -> None:
    run = whole()
    infinite, steep = read_interventions(run.folder)
    assert (infinite.guard, infinite.first_step, infinite.last_step) == ("non_finite", 13, 14)
    assert (infinite.back_to, infinite.skipped) == (10, (12, 14))
    assert (steep.guard, steep.first_step, steep.last_step) == ("gradient_spike", 19, 23)
    assert (steep.back_to, steep.skipped) == (15, (20, 25)), "the checkpoint of step 20 came behind the first of these"
    assert list(run.column("loss")) == list(range(1, STEPS + 1))
    assert list(run.column("eval/email/loss")) == [8, 16, 24, 32]
    assert run.column("skipped") == {}
    assert all(math.isfinite(loss) for loss in run.column("loss").values())
    state = read_state(run.folder / "checkpoints" / f"step_{STEPS:08d}")
    assert state.skipped == SkippedData.of([(12, 14), (20, 25)])
    assert (state.samples, state.tokens) == (8 * STEPS, 256 * STEPS), "the schedule goes by what was trained on"
    assert read_state(run.folder / "checkpoints" / "step_00000010").skipped.ranges == ()
    (attempt,) = read_attempts(run.folder)
    assert attempt.exit_code == 0
    assert total([attempt])["lost"] > 0


def test_any_ranks_go_back_alike(begin: Callable[..., Job], command: Command) -> None:
    """By what the loss shows, on one rank and on four; then one of them checks what the four wrote."""
    spikes = "guards.loss_spike={action: roll_back, window: 8, look_back: 4}"
    quiet = ("guards.gradient_spike.action=ignore", "metrics.diagnostics_interval=null")
    changes = ("run.reproducible=any_ranks", spikes, *quiet)
    one, four = (begin(f"any_{ranks}", INFINITE, STEEP, ranks=ranks, changes=changes).wait() for ranks in (1, 4))
    assert (one.code, four.code) == (0, 0), one.stderr + four.stderr
    made, of_four = ([replace(its, time="") for its in read_interventions(each.run.folder)] for each in (one, four))
    assert [(its.guard, its.back_to, its.skipped) for its in made] == [
        ("non_finite", 10, (12, 14)),
        ("loss_spike", 15, (20, 25)),
    ]
    assert of_four == made
    assert four.run.numbers == one.run.numbers
    assert steps_of_chain(four.run) == steps_of_chain(one.run)
    for name, weight in one.run.weights(STEPS).items():
        assert torch.equal(four.run.weights(STEPS)[name], weight), name
    checked = command("replay", four.run.folder, "--verify", "--windows", "9")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_it_equals_a_run_that_never_read_that(whole: Callable[[], Run], begin: Callable[..., Job]) -> None:
    """The other run finds the record in its folder, and no poison in its data."""
    folder = whole().folder.with_name("never_read")
    folder.mkdir()
    shutil.copy(whole().folder / INTERVENTIONS, folder)
    outcome = begin(folder.name).wait()
    assert outcome.code == 0, outcome.stderr
    assert "went back" not in outcome.stderr
    assert_same(outcome.run, whole())
    chains = [steps_of_chain(run) for run in (outcome.run, whole())]
    assert chains[0] == chains[1]


def test_it_can_be_made_again(whole: Callable[[], Run], start: Start) -> None:
    folder = whole().folder
    words = [folder, "--verify", "--json", "--windows", "9"]
    outcome = start("launcher/replay.py", words, folder, ranks=2).wait()
    found = json.loads(outcome.stdout)
    assert (outcome.code, found["verdict"], found["contradictions"]) == (0, "verified", []), outcome.stdout
    assert sum(window["steps"] for window in found["windows"]) == STEPS


def test_who_looks_is_told(whole: Callable[[], Run], command: Command) -> None:
    run = whole()
    seen = SeenRun(run.folder)
    first = {step: seen.step(step).samples[0].number for step in (12, 13, 18, 19, STEPS)}
    assert first == {12: 88, 13: 112, 18: 152, 19: 200, STEPS: 8 * (STEPS + 6)}
    kept = [sample for sample in range(8 * (STEPS + 7)) if not 96 <= sample < 112 and not 160 <= sample < 200]
    name, windows = seen.batches.order.sources[0].name, seen.batches.order.sources[0].num_windows
    reads = seen._reads(name, range(windows), holds_text=True)
    assert sorted((read.step, read.sample) for read in reads) == [(1 + i // 8, kept[i]) for i in range(8 * STEPS)]
    lines = command("status", run.folder).stdout.splitlines()
    assert [line.partition(": ")[2].partition(":")[0] for line in lines[-2:]] == ["non_finite", "gradient_spike"]
    told = json.loads(command("status", run.folder, "--json").stdout)["runs"][0]["interventions"]
    assert [made["back_to"] for made in told] == [10, 15]


def test_killed_after_it_went_back_it_goes_on_with_the_same_bits(
    whole: Callable[[], Run], begin: Callable[..., Job]
) -> None:
    """What was infinite is so no more when the run resumes from before its first checkpoint without that data."""
    job = begin("killed", INFINITE, STEEP)
    job.wait_until((job.run.folder / INTERVENTIONS).exists)
    job.kill()
    assert len(read_interventions(job.run.folder)) == 1
    elastic = Run(shutil.copytree(job.run.folder, job.run.folder.with_name("elastic")))
    outcome = begin("killed", STEEP).wait()
    assert outcome.code == 0, outcome.stderr
    assert "resuming after step 10 from" in outcome.stdout
    assert len(read_interventions(job.run.folder)) == 2
    assert_same(outcome.run, whole())

    outcome = begin("elastic", STEEP, ranks=1, changes=("deepspeed.zero_stage=3",)).wait()
    assert outcome.code == 0, outcome.stderr
    assert [each.skipped for each in read_interventions(elastic.folder)] == [(12, 14), (20, 25)]
    assert list(elastic.column("loss")) == list(range(1, STEPS + 1))


# -- in one process ----------------------------------------------------------------------------------------------------

SHORT = [
    "train.steps=12",
    "train.eval_interval=null",
    "checkpoint.interval=2",
    "checkpoint.keep_last=9",
    "metrics.diagnostics_interval=null",
    "guards.non_finite.max_skipped=1",
]


@pytest.fixture
def attempt(
    tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Run, Config]]:
    """Train in this process: (poison, overrides) -> its run."""

    def run(poison: Poison, *overrides: str) -> tuple[Run, Config]:
        monkeypatch.setattr(NextToken, "forward", forward_with(poison))
        config = branch.resolve(load_config(tiny_config, [*SHORT, f"run.root={tmp_path}", *overrides]))
        assert train(config, open_inputs(config, world), world, StopRequest())
        return Run(config.run.folder), config

    return run


def test_a_run_that_is_broken_everywhere_ends(attempt: Callable[..., Any], tmp_path: Path) -> None:
    everywhere = [(48, 10**9, "inf")]
    with pytest.raises(
        TrainingError, match=r"step 7: .* norm is (inf|nan) .* guards.max_rollbacks = 2, and it went back 2"
    ):
        attempt(everywhere, "guards.max_rollbacks=2")
    run = Run(tmp_path / "tiny")
    assert [each.skipped for each in read_interventions(run.folder)] == [(6, 7), (7, 8)]
    assert "step_00000006" in run.checkpoints
    assert not (run.folder / "result.json").exists()
    before = (run.folder / INTERVENTIONS).stat().st_mtime_ns
    with pytest.raises(TrainingError, match=r"guards.max_rollbacks = 2, and it went back 2"):
        attempt(everywhere, "guards.max_rollbacks=2")
    assert (run.folder / INTERVENTIONS).stat().st_mtime_ns == before, "the next start knows, and does not go back"
    with pytest.raises(TrainingError, match=r"guards.max_rollbacks = 3, and it went back 3"):
        attempt(everywhere, "guards.max_rollbacks=3")
    assert [each.skipped for each in read_interventions(run.folder)] == [(6, 7), (7, 8), (8, 9)]


def test_checkpoints_behind_the_first_bad_step_are_gone(attempt: Callable[..., Any], tmp_path: Path) -> None:
    """Or a kill before the next save would have the run go on from one of them."""
    poison = [(80, 88, 1000), (88, 10**9, "inf")]
    spike = "guards.gradient_spike={action: roll_back, window: 8, look_back: 4}"
    with pytest.raises(TrainingError, match=r"step 7: .* guards.max_rollbacks = 1"):
        attempt(poison, spike, "guards.max_rollbacks=1")
    run = Run(tmp_path / "tiny")
    (made,) = read_interventions(run.folder)
    assert (made.first_step, made.last_step, made.back_to, made.skipped) == (7, 11, 6, (6, 11))
    assert run.checkpoints == ["latest", "step_00000002", "step_00000004", "step_00000006"]
    assert (run.folder / "checkpoints" / "latest").read_text() == "step_00000006\n"


def test_a_checkpoint_alone_knows_what_is_left_out(attempt: Callable[..., Any]) -> None:
    """As for a branch, which has a run folder of its own."""
    run, _ = attempt([(64, 72, "inf")])
    (run.folder / INTERVENTIONS).unlink()
    assert SeenRun(run.folder).skipped.ranges == ((8, 9),)
    longer, _ = attempt([(64, 72, "inf")], "train.steps=14")
    assert read_interventions(longer.folder) == []
    assert read_state(longer.folder / "checkpoints" / "step_00000014").skipped.ranges == ((8, 9),)


def test_without_a_checkpoint_before_it_ends(attempt: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"step 2: .* there is no whole checkpoint of a step before 2\. Lower"):
        attempt([(8, 16, "inf")])
    assert read_interventions(tmp_path / "tiny") == []


@pytest.fixture
def branched(attempt: Callable[..., Any]) -> tuple[Run, list[str]]:
    """Train a parent; return it, and what is typed to branch from its step 6, for four steps."""
    phases = ["schedule.warmup=2steps", "schedule.decay=25%"]
    parent, _ = attempt([], "run.name=parent", *phases)
    left = f"schedule.branch.checkpoint={parent.folder / 'checkpoints' / 'step_00000006'}"
    return parent, ["run.name=branch", *phases, left, "schedule.branch.steps=4", "checkpoint.interval=1"]


def test_a_branch_goes_back_to_where_it_left_its_parent(
    attempt: Callable[..., Any], branched: tuple[Run, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed once all of its own checkpoints, damaged ones here, were deleted, it begins there as well."""
    parent, typed = branched
    run = Run(parent.folder.with_name("branch"))
    go_back, resume = loop.Trainer._go_back, loop.Trainer.resume

    def damage_own(trainer: loop.Trainer, asked: Any) -> None:
        trainer.saver.finish()  # what is still being written could not be damaged
        for state in (run.folder / "checkpoints").glob("step_*/state.json"):
            state.unlink()
        shutil.rmtree(run.folder / "checkpoints" / "step_00000006")  # its first, which going back would not delete
        monkeypatch.setattr(loop.Trainer, "resume", die)
        go_back(trainer, asked)

    def die(_trainer: loop.Trainer, _folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Trainer, "_go_back", damage_own)
    poison = [(64, 72, "inf")]  # step 9
    with pytest.raises(KeyboardInterrupt):
        attempt(poison, *typed)
    assert [name for name in run.checkpoints if name.startswith("step_")] == []
    assert noted_checkpoint(run.folder) == 7
    monkeypatch.setattr(loop.Trainer, "resume", resume)
    attempt(poison, *typed)
    (made,) = read_interventions(run.folder)
    assert (made.first_step, made.last_step, made.back_to, made.skipped) == (9, 9, 6, (8, 9))
    assert "step_00000010" in run.checkpoints
    assert "step_00000012" in parent.checkpoints, "only the branch's own later ones are deleted"


def test_a_branch_that_goes_back_to_its_parent_saves_its_first_checkpoint_again(
    attempt: Callable[..., Any], branched: tuple[Run, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a later one was still being written when it went back."""
    _, typed = branched
    go_back = loop.Trainer._go_back

    def lose_own(trainer: loop.Trainer, asked: Any) -> None:
        writing = trainer.saver.writer._thread
        assert writing is not None
        writing.join()
        for folder in (trainer.config.run.folder / "checkpoints").glob("step_*"):
            shutil.rmtree(folder)
        go_back(trainer, asked)

    monkeypatch.setattr(loop.Trainer, "_go_back", lose_own)
    run, _ = attempt([(64, 72, "inf")], *typed)  # step 9
    assert [made.back_to for made in read_interventions(run.folder)] == [6]
    assert "step_00000006" in run.checkpoints


def test_a_branch_whose_parent_is_gone_says_what_it_would_have_gone_back_for(
    attempt: Callable[..., Any], branched: tuple[Run, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, typed = branched

    def lose_both(trainer: loop.Trainer, asked: Any) -> None:
        for folder in (parent.folder, parent.folder.with_name("branch")):
            shutil.rmtree(folder / "checkpoints" / "step_00000006")
        go_back(trainer, asked)

    go_back = loop.Trainer._go_back
    monkeypatch.setattr(loop.Trainer, "_go_back", lose_both)
    with pytest.raises(TrainingError, match=r"step 7: .* there is no whole checkpoint of a step before 7"):
        attempt([(48, 56, "inf")], *typed)


def test_in_the_warm_up_of_the_batch_size_it_ends(attempt: Callable[..., Any], tmp_path: Path) -> None:
    warmup = "data.batch_size_warmup=[{tokens: 1024, global_batch_size: 4}]"  # 8 steps of 4 sequences
    with pytest.raises(TrainingError, match=r"step 5: .* no data is left out before step 8, where the warm-up"):
        attempt([(16, 20, "inf")], warmup)
    run, _ = attempt([(48, 56, "inf")], warmup, "run.name=after")
    (made,) = read_interventions(run.folder)
    assert (made.last_step, made.skipped, made.back_to) == (11, (10, 11), 10)


def test_without_other_data_it_ends(attempt: Callable[..., Any], corpus: Path) -> None:
    source = f"data.train=[{{path: {corpus}, max_epochs: 0.009}}]"  # 102 windows for 96 samples
    with pytest.raises(TrainingError, match=r"step 7: .* too little: data.train: no source is left"):
        attempt([(48, 49, "inf")], source)


def test_broken_weights_and_the_last_update_send_it_back_as_well(attempt: Callable[..., Any]) -> None:
    run, _ = attempt([(88, 96, "inf")], "guards.non_finite.max_skipped=10")
    (made,) = read_interventions(run.folder)
    assert (made.first_step, made.last_step, made.back_to) == (12, 12, 10)
    assert (run.folder / "result.json").exists()


def test_checkpoints_on_the_nodes_are_gone_back_to(attempt: Callable[..., Any], tmp_path: Path) -> None:
    local = f"checkpoint.local={{path: {tmp_path / 'node'}, interval: 2}}"
    run, _ = attempt([(64, 72, "inf")], local, "checkpoint.interval=5", "checkpoint.background=false")
    (made,) = read_interventions(run.folder)
    assert (made.last_step, made.back_to) == (9, 8)
    assert list(run.column("loss")) == list(range(1, 13))


@pytest.mark.parametrize(("place", "name", "calls"), [(rollback, "write_interventions", 0), (loop, "MetricsLog", 1)])
def test_a_disk_that_is_full_when_it_goes_back_ends_it_until_there_is_room(
    attempt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, calls: int
) -> None:
    real, left = getattr(place, name), [calls]

    def full(*given: Any) -> Any:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, full)
        with pytest.raises(
            UnsavedError, match=r"tiny could not be written \(.*No space left on device\): free some space"
        ):
            attempt([(64, 72, "inf")])
    run, _ = attempt([(64, 72, "inf")])
    assert list(run.column("loss")) == list(range(1, 13))
    assert [made.skipped for made in read_interventions(run.folder)] == [(8, 9)]


def test_a_record_that_cannot_be_obeyed_is_refused(attempt: Callable[..., Any]) -> None:
    run, _ = attempt([(64, 72, "inf")])
    target = run.folder.with_name("other")
    target.mkdir()
    shutil.copy(run.folder / INTERVENTIONS, target)
    warmup = "data.batch_size_warmup=[{tokens: 4096, global_batch_size: 4}]"
    with pytest.raises(ConfigError, match=r"interventions.jsonl: no data is left out before step 32"):
        attempt([], "run.name=other", "train.steps=40", warmup)
