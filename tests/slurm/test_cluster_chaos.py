"""Kill ranks, launchers and nodes of a job at random moments: requeued by itself, the run is the same to the last bit.

    PLUMBLINE_KILLS=12 python -m pytest -m proof tests/slurm/test_cluster_chaos.py -s     skipped without the number

Jobs of two clusters may meet at the same port: run it alone.

A launcher is srun. A node dies with its daemon and all that it runs, and is back soon; the one with the batch script
only after half a minute: Slurm looks for a job that a node has lost when the node registers, and leaves out what it
heard of in the last 20 seconds. A job that Slurm has given up, since two attempts in a row came to nothing, is
submitted again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from plumbline.launcher.runtime.checkpoint.tensors import shard_name
from tests.conftest import SPEED
from tests.slurm.conftest import Cluster, cluster_of

KILLS = int(os.environ.get("PLUMBLINE_KILLS", "3"))
KINDS = ("rank", "launcher", "node", "batch node")
STEPS = 200
ENDED = ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", "TIMEOUT")


@pytest.mark.skipif("PLUMBLINE_KILLS" not in os.environ, reason="a node's death takes a minute; say PLUMBLINE_KILLS=12")
@pytest.mark.usefixtures("cluster")  # which says whether there is Slurm; nodes are killed in another one
def test_whoever_is_killed_the_job_ends_as_it_would_have(config: Path, tmp_path: Path) -> None:
    draw, kills, submitted, runs = random.Random(KILLS), Counter[str](), 0, 0
    with cluster_of("n1", "n2", "n3") as own:
        begun = time.monotonic()
        job_id = submit(own, config, "whole")
        own.wait_end(job_id)
        takes = time.monotonic() - begun
        whole = tmp_path / "runs" / "whole"
        while kills.total() < KILLS:
            runs += 1
            name = f"tormented_{runs}"
            while not (tmp_path / "runs" / name / "result.json").exists():
                submitted += 1
                torment(own, submit(own, config, name), takes, draw, kills)
                assert submitted <= runs + KILLS, "each submission but the last of a run was killed"
            assert numbers(tmp_path / "runs" / name) == numbers(whole)
    print(f"\n{dict(kills)}; {runs} run(s), submitted {submitted} times")


def submit(cluster: Cluster, config: Path, name: str) -> str:
    """Submit a run, or what is left of it, and return the job's id."""
    length = (f"train.steps={STEPS}", "checkpoint.interval=10")
    (job_id,) = cluster.submit(config, f"run.name={name}", *length, "train.hang_minutes=0.5")
    return job_id


def torment(cluster: Cluster, job_id: str, takes: float, draw: random.Random, kills: Counter[str]) -> None:
    """Kill something of each attempt of a job, until the job has ended or enough was killed."""
    while True:
        job = cluster.wait_for(job_id, lambda job: job["JobState"] in ("RUNNING", *ENDED))
        if job["JobState"] in ENDED:
            return
        time.sleep(draw.uniform(0, takes))
        kind = KINDS[kills.total() % len(KINDS)]
        now = cluster.job(job_id)
        if now["JobState"] == "RUNNING" and kills.total() < KILLS and kill(cluster, now, kind, draw):
            kills[kind] += 1
        cluster.wait_for(job_id, partial(is_over, restarts=job["Restarts"]))


def is_over(job: dict[str, str], restarts: str) -> bool:
    """Return whether the attempt after so many restarts has ended."""
    return job["Restarts"] != restarts or job["JobState"] in ENDED


def kill(cluster: Cluster, job: dict[str, str], kind: str, draw: random.Random) -> bool:
    """Kill one of a kind that a running job has; return whether there was one."""
    if kind in ("node", "batch node"):
        first = job["BatchHost"]
        (other,) = {*cluster.run("scontrol", "show", "hostnames", job["NodeList"]).split()} - {first}
        node, away = (first, draw.uniform(25, 60)) if kind == "batch node" else (other, draw.uniform(0, 5))
        cluster.fail_node(node)
        time.sleep(away)
        cluster.start_node(node)
        return True
    found = cluster.ranks() if kind == "rank" else [*filter(is_launcher, cluster.processes())]
    if not found:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        draw.choice(found).kill()
    return True


def is_launcher(process: psutil.Process) -> bool:
    """Return whether it is srun, and not the helper that it forks."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = process.parent()
        return process.name() == "srun" and (parent is None or parent.name() != "srun")
    return False


def numbers(run: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return what a run logged, without speeds, and its last checkpoint's states."""
    text = (run / "metrics.jsonl").read_text().splitlines()
    lines = [{key: value for key, value in json.loads(line).items() if key not in SPEED} for line in text]
    state = run / "checkpoints" / f"step_{STEPS:08d}"
    told = [line for line in lines if line.keys() > {"step", "tokens"}]
    return told, [(state / shard_name(rank)).read_bytes() for rank in range(2)]
