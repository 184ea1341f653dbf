"""Kill ranks at random moments, again and again: nothing is lost beyond the last checkpoint, and the run is the same.

    PLUMBLINE_KILLS=200 python -m pytest tests/distributed/test_chaos.py -s     many kills, and a table

Each attempt is killed after a random while, start-up and saves included: one rank, whose peers have to end by
themselves (while ranks meet, their launcher ends them), or all of them. The same command goes on until the run is
complete. Where the ranks stay what they are, every number and the last checkpoint are those of a run that nobody
disturbed, to the last bit; where their number and stage change at every attempt, losses are within the order of
summation, or to the last bit as well where `run.reproducible: any_ranks` asks for it.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from plumbline.launcher.runtime.checkpoint import store
from plumbline.launcher.runtime.checkpoint.tensors import shard_name
from plumbline.launcher.runtime.run.ledger import total
from plumbline.launcher.runtime.run.status_file import read_attempts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Job, Pretrain, Run, Start

KILLS = int(os.environ.get("PLUMBLINE_KILLS", "8"))
SHARE = 6  # scenarios that the kills are divided over
STEPS, INTERVAL = 24, 3
COMMON = [
    f"train.steps={STEPS}",
    "train.eval_interval=12",
    "train.eval_batches=4",
    f"checkpoint.interval={INTERVAL}",
    "checkpoint.keep_last=2",
    "data.micro_batch_size=2",
    "train.ema_half_life_tokens=512",
    "metrics.diagnostics_interval=null",
]


@dataclass(frozen=True)
class Layout:
    """Hold the ranks of one attempt."""

    ranks: int
    stage: int

    @property
    def overrides(self) -> list[str]:
        return [f"deepspeed.zero_stage={self.stage}"]


@dataclass
class Tally:
    """Count what happened to the runs of a scenario."""

    runs: int = 0
    attempts: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    """Steps that were made again after each kill."""
    seconds: Counter[str] = field(default_factory=Counter)
    """What the ledgers of the runs say of all their time."""


SCENARIOS = {
    "stage 1": ([], [Layout(2, 1)]),
    "stage 3, bf16": (["deepspeed.precision=bf16"], [Layout(2, 3)]),
    "stage 1, checkpoints on nodes": (
        ["checkpoint.interval=12", "checkpoint.local.interval=2", "checkpoint.local.path={node}"],
        [Layout(2, 1)],
    ),
    "stage 2, muon": (["optimizer.name=muon"], [Layout(2, 2)]),
    "ranks and stages change": ([], [Layout(2, 1), Layout(1, 3), Layout(4, 2), Layout(2, 0)]),
    "any ranks, bf16": (
        ["run.reproducible=any_ranks", "deepspeed.precision=bf16"],
        [Layout(4, 1), Layout(1, 2), Layout(2, 1), Layout(4, 2)],
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_random_moments_a_run_ends_as_it_would_have(
    name: str, start_pretrain: Start, run_pretrain: Pretrain, tiny_config: Path, tmp_path: Path
) -> None:
    overrides, layouts = SCENARIOS[name]
    overrides = [override.format(node=tmp_path) for override in overrides]
    draw = random.Random(name)
    begun = time.monotonic()
    label = name.replace(" ", "_").replace(",", "")
    first = [*COMMON, *overrides, *layouts[0].overrides]
    whole = run_pretrain(tiny_config, f"{label}_whole", first, ranks=layouts[0].ranks)
    assert whole.code == 0, whole.stderr
    takes = time.monotonic() - begun

    tally = Tally()
    while tally.kills.total() < KILLS / SHARE:
        tally.runs += 1
        run = torment(
            start_pretrain, tiny_config, f"{label}_{tally.runs}", overrides, layouts, takes, draw, tally, tmp_path
        )
        tally.seconds.update(total(read_attempts(run.folder)))
        assert list(tmp_path.iterdir()) == [], "nothing stays on the nodes"
        assert [path for path in (run.folder / "checkpoints").iterdir() if path.name.startswith(".")] == []
        for folder in store.checkpoints(run.folder / "checkpoints"):
            assert store.problems(folder, contents=True) == []
        if len(layouts) == 1:
            assert_same_bits(run, whole.run, layouts[0].ranks)
        elif "run.reproducible=any_ranks" in overrides:
            assert_same_numbers(run, whole.run)
        else:
            assert run.column("loss") == pytest.approx(whole.run.column("loss"), rel=1e-5)
    again = f"{sum(tally.lost) / max(1, len(tally.lost)):.1f} a kill, {max(tally.lost, default=0)} at most"
    print(f"\n{name}: {dict(tally.kills)} in {tally.attempts} attempts of {tally.runs} runs; steps made again: {again}")
    whole_time = sum(tally.seconds.values())
    print(", ".join(f"{bucket} {seconds / whole_time:.1%}" for bucket, seconds in tally.seconds.items()))


def torment(
    start_pretrain: Start,
    tiny_config: Path,
    name: str,
    overrides: list[str],
    layouts: list[Layout],
    takes: float,
    draw: random.Random,
    tally: Tally,
    node: Path,
) -> Run:
    """Start a run and kill it until it is complete all the same; return it."""
    while True:
        layout = draw.choice(layouts)
        arguments = [*COMMON, *overrides, *layout.overrides]
        job = start_pretrain(tiny_config, name, arguments, ranks=layout.ranks)
        tally.attempts += 1
        ended = wait_or_kill(job, draw.uniform(0, takes), draw, tally)
        if ended:
            assert job.wait().code == 0, job.texts()
            return job.run
        tally.lost.append(steps_to_repeat(job.run, node))


def wait_or_kill(job: Job, seconds: float, draw: random.Random, tally: Tally) -> bool:
    """Kill one rank or all after a while; return whether the run was complete before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(process.poll() is not None for process in job.processes):
            return True
        time.sleep(0.01)
    if (job.run.folder / "result.json").exists():
        return True
    training = re.search(r"^step +\d+/", job.texts()[0], re.MULTILINE)
    victims = job.processes if draw.random() < 0.5 else (draw.choice(job.processes),)
    tally.kills["all ranks" if len(victims) == len(job.processes) else "one rank"] += 1
    for process in victims:
        process.send_signal(signal.SIGKILL)
    if not training:  # ranks that wait to meet are ended by their launcher
        for process in job.processes:
            process.send_signal(signal.SIGKILL)
    codes = job.wait(timeout=120).codes  # no rank outlives another
    return not any(codes)  # all had ended well just before


def steps_to_repeat(run: Run, node: Path) -> int:
    """Return how many steps were made after the newest checkpoint, on the nodes of all ranks or in the run folder."""
    saved = [store.step_of(folder) for folder in store.checkpoints(run.folder / "checkpoints")]
    parts = [{store.step_of(part) for part in store.checkpoints(rank)} for rank in node.glob("[!.]*/rank_*")]
    saved += set.intersection(*parts) if parts else set()
    return max(0, max((record["step"] for record in run.records), default=0) - max(saved, default=0))


def assert_same_numbers(run: Run, whole: Run) -> None:
    assert run.numbers == whole.numbers
    weights = [each.weights(STEPS) for each in (run, whole)]
    assert [name for name, weight in weights[0].items() if not torch.equal(weight, weights[1][name])] == []


def assert_same_bits(run: Run, whole: Run, ranks: int) -> None:
    assert_same_numbers(run, whole)
    for rank in range(ranks):
        files = [each.folder / "checkpoints" / f"step_{STEPS:08d}" / shard_name(rank) for each in (run, whole)]
        assert files[0].read_bytes() == files[1].read_bytes()
