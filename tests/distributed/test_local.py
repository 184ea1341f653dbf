"""Checkpoints on the nodes: a resume goes on from them if every rank finds its part, and from the run folder if not.

Ranks on one machine share what would be the storage of several nodes; each reads nothing but its own folder in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plumbline.launcher.runtime.checkpoint import store
from plumbline.launcher.runtime.checkpoint.tensors import shard_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Job, Outcome, Pretrain, Run, Start

STEPS, SHARED, LOCAL = 96, 45, 5  # less than 100: from there on metrics.jsonl has times of windows
COMMON = [
    f"train.steps={STEPS}",
    "train.eval_interval=null",
    f"checkpoint.interval={SHARED}",
    "train.ema_half_life_tokens=512",
    "metrics.diagnostics_interval=null",
]


def on_nodes(path: Path, interval: int = LOCAL) -> list[str]:
    return [f"checkpoint.local.path={path}", f"checkpoint.local.interval={interval}"]


def parts(path: Path, rank: int) -> list[Path]:
    """Return the local checkpoints of a rank of the one run that has any, newest first."""
    homes = (home for home in path.iterdir() if not home.name.startswith("."))
    return [folder for home in homes for folder in store.checkpoints(home / f"rank_{rank:05d}")]


def resumed_from(outcome: Outcome) -> str:
    """Return what a run said that it went on from."""
    lines = [line for line in outcome.stdout.splitlines() if line.startswith("resuming after step")]
    assert len(lines) == 1, outcome.stdout
    return lines[0]


def assert_same_bits(run: Run, whole: Run, ranks: int = 2) -> None:
    assert run.numbers == whole.numbers
    for rank in range(ranks):
        files = [each.folder / "checkpoints" / f"step_{STEPS:08d}" / shard_name(rank) for each in (run, whole)]
        assert files[0].read_bytes() == files[1].read_bytes()


def kill(job: Job, path: Path, step: int) -> None:
    """Kill all ranks once both have a local checkpoint of at least `step`."""
    job.wait_until(lambda: all(any(store.step_of(f) >= step for f in parts(path, rank)) for rank in (0, 1)))
    for number in (signal.SIGSTOP, signal.SIGKILL):  # else the other might see the first one end, and end by itself
        for process in job.processes:
            process.send_signal(number)
    assert set(job.wait().codes) == {-signal.SIGKILL}


@pytest.fixture(scope="module")
def whole(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    """Train two ranks at stage 1, undisturbed, with no local checkpoints."""
    outcome = run_pretrain(tiny_config, "local_whole", COMMON, ranks=2)
    assert outcome.code == 0, outcome.stderr
    return outcome.run


@dataclass(frozen=True)
class Killed:
    """Hold a run that was killed between two checkpoints of its run folder, and what lies on its nodes."""

    again: Callable[..., Outcome]
    """Goes on, after the folders were put back as the kill left them."""
    path: Path
    step: int
    """Of the newest local checkpoint that all ranks have."""

    def part(self, rank: int) -> Path:
        return parts(self.path, rank)[-1]


@pytest.fixture(scope="module")
def killed_once(
    start_pretrain: Start, run_pretrain: Pretrain, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Killed]:
    path, kept = (tmp_path_factory.mktemp(name) for name in ("node", "kept"))
    arguments = [*COMMON, *on_nodes(path)]
    job = start_pretrain(tiny_config, "local_killed", arguments, ranks=2)
    kill(job, path, SHARED + 10)
    folders = {job.run.folder: kept / "run", path: kept / "node"}
    for folder, copy in folders.items():
        shutil.copytree(folder, copy)
    common = {store.step_of(folder) for folder in parts(path, 0)} & {store.step_of(f) for f in parts(path, 1)}

    def put_back() -> Killed:
        for folder, copy in folders.items():
            shutil.rmtree(folder)
            shutil.copytree(copy, folder)

        def again(*overrides: str, ranks: int = 2) -> Outcome:
            return run_pretrain(tiny_config, "local_killed", [*arguments, *overrides], ranks=ranks)

        return Killed(again, path, max(common))

    return put_back


@pytest.fixture
def killed(killed_once: Callable[[], Killed]) -> Killed:
    return killed_once()


def test_a_killed_run_loses_what_came_after_the_local_checkpoint_alone(killed: Killed, whole: Run) -> None:
    assert store.checkpoints(whole.folder.parent / "local_killed" / "checkpoints")[0].name == f"step_{SHARED:08d}"
    assert killed.step >= SHARED + 10
    outcome = killed.again()
    assert outcome.code == 0, outcome.stderr
    assert f"saves    every {SHARED} steps to the run folder, every {LOCAL} to {killed.path}" in outcome.stdout
    assert resumed_from(outcome).startswith(f"resuming after step {killed.step} from {killed.path}/local_killed-")
    assert "warning: " not in outcome.stderr
    assert_same_bits(outcome.run, whole)
    assert list(killed.path.iterdir()) == [], "a run that is complete leaves nothing on its nodes"


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_goes_on_from_its_own_file_at_every_stage(
    stage: int, start_pretrain: Start, run_pretrain: Pretrain, tiny_config: Path, tmp_path: Path
) -> None:
    """Ranks of stage 0 divide a checkpoint of the run folder; on a node each has the whole."""
    arguments = [*COMMON, f"deepspeed.zero_stage={stage}"]
    undisturbed = run_pretrain(tiny_config, f"local_whole_{stage}", arguments, ranks=2)
    arguments += on_nodes(tmp_path)
    kill(start_pretrain(tiny_config, f"local_{stage}", arguments, ranks=2), tmp_path, 10)
    outcome = run_pretrain(tiny_config, f"local_{stage}", arguments, ranks=2)
    assert outcome.code == 0, outcome.stderr
    assert str(tmp_path) in resumed_from(outcome)
    assert_same_bits(outcome.run, undisturbed.run)


def cut(killed: Killed) -> str:
    os.truncate(killed.part(1) / shard_name(1), 5000)
    return r"rank 1 on \S+: state/rank_00001.safetensors has 5000 bytes"


def exchange(killed: Killed) -> str:
    """Let two ranks have each other's folders, whole as they are."""
    mine, other = killed.part(0), killed.part(1)
    between = mine.with_name("between")
    mine.rename(between)
    other.rename(mine)
    between.rename(other)
    return r"rank 0 on \S+: it is another rank's; rank 1 on \S+: it is another rank's"


def mix(killed: Killed) -> str:
    """Let one rank have its part of another save of the same step, as an attempt leaves it that ended in between."""
    manifest = store.read_manifest(killed.part(1))
    manifest["save"] = "another"
    text = json.dumps({**manifest, "checksum": store.manifest_checksum(manifest)})
    (killed.part(1) / store.MANIFEST).write_text(text)
    return "its parts are of several saves"


def lose(killed: Killed) -> str:
    """Let a rank be on another node."""
    shutil.rmtree(killed.part(0).parent)
    return r"rank 0 on \S+: there is none"


@pytest.mark.parametrize("damage", [cut, exchange, mix, lose])
def test_where_one_rank_has_no_use_for_its_part_all_go_on_from_the_run_folder(
    damage: Callable[[Killed], str], killed: Killed, whole: Run
) -> None:
    for rank in (0, 1):  # a kill between the new one and the end of the old one may have left both
        for folder in parts(killed.path, rank):
            if store.step_of(folder) != killed.step:
                shutil.rmtree(folder)
    words = damage(killed)
    outcome = killed.again()
    assert outcome.code == 0, outcome.stderr
    assert f"resuming after step {SHARED} from {outcome.run.folder}/checkpoints" in resumed_from(outcome)
    (warning,) = [line for line in outcome.stderr.splitlines() if line.startswith("warning: ")]
    assert f"step_{killed.step:08d} cannot be used and is passed over: " in warning
    assert re.search(words, warning), warning
    assert_same_bits(outcome.run, whole)


def test_another_number_of_ranks_goes_on_from_the_run_folder(killed: Killed, whole: Run) -> None:
    outcome = killed.again(ranks=1)
    assert outcome.code == 0, outcome.stderr
    assert f"resuming after step {SHARED} from {outcome.run.folder}/checkpoints" in resumed_from(outcome)
    assert re.search(r"rank 0 on \S+: written by 2 rank\(s\), read by 1", outcome.stderr)
    assert outcome.run.column("loss") == pytest.approx(whole.column("loss"), rel=1e-4)
    assert list(killed.path.iterdir()) == [], "nor does what the rank that is gone had"
