"""Ranks that srun starts without slurm/pretrain.sbatch: by hand, and by DeepSpeed's launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.slurm.probe import REPOSITORY

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

WORLD = """
import os
from plumbline.launcher.runtime.system.threads import ranks_on_this_host
from plumbline.launcher.runtime.ranks.world import read_world
world = read_world()
place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
print(world.rank, world.local_rank, world.size, *place, ranks_on_this_host(os.environ))
"""


def test_tasks_of_a_bare_srun_know_where_to_meet(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    python = cluster.environment["PLUMBLINE_PYTHON"]
    options = ("--nodes=2", "--ntasks-per-node=2", f"--export=ALL,PYTHONPATH={REPOSITORY}/launcher")
    found = cluster.run("srun", *options, python, tmp_path / "world.py").splitlines()
    ranks = sorted(line.split() for line in found)
    assert [rank[:3] for rank in ranks] == [["0", "0", "4"], ["1", "1", "4"], ["2", "0", "4"], ["3", "1", "4"]]
    assert {rank[3] for rank in ranks} == {"127.0.0.1"}, "the address of n1, whose name does not resolve"
    assert len({rank[4] for rank in ranks}) == 1


def test_steps_that_run_at_once_in_an_allocation_meet_apart(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    step = f"srun --exact --ntasks=2 {cluster.environment['PLUMBLINE_PYTHON']} {tmp_path}/world.py"
    command = f"export PYTHONPATH={REPOSITORY}/launcher; {step} & {step}; wait"
    found = cluster.run("salloc", "--nodes=1", "--ntasks=4", "bash", "-c", command).splitlines()
    ranks = sorted(line.split() for line in found if line.startswith(("0 ", "1 ")))
    assert [rank[:3] for rank in ranks] == [["0", "0", "2"], ["0", "0", "2"], ["1", "1", "2"], ["1", "1", "2"]]
    assert len({rank[4] for rank in ranks}) == 2
    assert {rank[5] for rank in ranks} == {"2"}, "who share the cores of a node"


def test_deepspeed_starts_ranks_by_srun(cluster: Cluster, config: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    deepspeed = Path(cluster.environment["PLUMBLINE_PYTHON"]).with_name("deepspeed")
    launcher = ("--launcher", "slurm", "--no_ssh_check", "--master_addr", "127.0.0.1", "--hostfile", "hosts")
    shape = ("--launcher_args", "--nodes=2 --ntasks-per-node=1")
    overrides = ("train.steps=2", "schedule.warmup=0steps", "run.name=by_deepspeed")
    program = (REPOSITORY / "launcher" / "pretrain.py", "--config", config, *overrides)
    printed = cluster.run(deepspeed, *launcher, *shape, *program, cwd=tmp_path)
    assert "2 rank(s)" in printed
    result = json.loads((tmp_path / "runs" / "by_deepspeed" / "result.json").read_text())
    assert result["step"] == 2
