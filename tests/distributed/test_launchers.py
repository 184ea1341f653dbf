"""Whoever starts the ranks, training runs; and what is wrong with the way it was started is said, not waited for."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plumbline.launcher.runtime.cluster.attempts import LACKING, accused
from plumbline.launcher.runtime.ranks.deepspeed_start import SHARED_MEMORY, extensions_folder
from plumbline.launcher.runtime.ranks.world import read_world
from plumbline.launcher.runtime.system.exit_codes import UNREACHED
from plumbline.launcher.runtime.system.log import LOG

if TYPE_CHECKING:
    from tests.conftest import Pretrain

SHORT = ["train.steps=2", "train.eval_interval=null"]
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def alone(run_pretrain: Pretrain, tiny_config: Path) -> dict[int, float]:
    """Return the losses of a run by plain `python`."""
    outcome = run_pretrain(tiny_config, "python", SHORT, launcher="python", fresh=True)
    assert outcome.code == 0, outcome.stderr
    assert "1 rank(s)" in outcome.stdout
    assert "length   tau 1.25e+03, warm-up 100.00% of the steps" in outcome.stdout
    assert "warning  schedule.warmup lasts 100.00% of the steps" in outcome.stdout
    losses: dict[int, float] = outcome.run.column("loss")
    assert list(losses) == [1, 2]
    return losses


def buffers() -> set[str]:
    """Return the names of DeepSpeed's buffers in this host's shared memory."""
    return {file.name for file in Path(SHARED_MEMORY).glob("deepspeed_allreduce_buffer_*")}


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_every_launcher_trains_the_same(
    run_pretrain: Pretrain, tiny_config: Path, alone: dict[int, float], launcher: str
) -> None:
    before = buffers()
    outcome = run_pretrain(tiny_config, launcher, SHORT, ranks=2, launcher=launcher)
    assert outcome.code == 0, outcome.stderr
    left, end = buffers() - before, time.monotonic() + 60
    while left & buffers() and time.monotonic() < end:  # those of other tests' runs, which are starting, vanish
        time.sleep(0.1)
    assert not left & buffers(), "memory that nobody would give back"
    assert "2 rank(s)" in outcome.stdout
    assert outcome.stdout.count("starting: 2 ranks of 1 thread each\n") == 1
    assert outcome.stdout.count("is complete") == 1, "only one rank talks"
    assert outcome.run.column("loss") == pytest.approx(alone, rel=1e-6)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return an environment that no launcher has touched, put back afterwards with whatever `read_world` sets."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in list(os.environ):
        if name in VARIABLES or name.startswith("SLURM"):
            monkeypatch.delenv(name)
    return monkeypatch


SLURM = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8", "MASTER_ADDR": "node1",
}  # fmt: skip


def set_environment(bare: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        bare.setenv(name, value)


def test_srun_variables_become_ours(bare: pytest.MonkeyPatch) -> None:
    set_environment(bare, SLURM)
    world = read_world()
    assert (world.rank, world.local_rank, world.size, world.is_main) == (5, 1, 8, False)
    assert {name: os.environ[name] for name in VARIABLES[:4]} == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node1"
    }  # fmt: skip
    port = int(os.environ["MASTER_PORT"])
    assert 1024 < port < 65536


def test_attempts_of_jobs_on_one_node_meet_at_different_ports(bare: pytest.MonkeyPatch) -> None:
    ports = []
    for job, restarts in (("4242", "0"), ("4243", "0"), ("4242", "1")):
        set_environment(bare, {**SLURM, "SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restarts})
        for name in ("RANK", "MASTER_PORT"):
            bare.delenv(name, raising=False)
        read_world()
        ports.append(os.environ["MASTER_PORT"])
    assert len({*ports}) == 3


def test_the_tasks_of_the_step_count_not_those_of_the_job(bare: pytest.MonkeyPatch) -> None:
    set_environment(bare, {**SLURM, "SLURM_STEP_NUM_TASKS": "6"})
    assert read_world().size == 6


def test_several_srun_tasks_need_an_address(bare: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of which Slurm itself is asked: tests/slurm/test_launchers.py; here, as in a container, there is no scontrol."""
    set_environment(bare, {**SLURM, "SLURM_STEP_NODELIST": "n[1-2]", "PATH": "/nowhere"})
    bare.delenv("MASTER_ADDR")
    with pytest.raises(ValueError, match=r"MASTER_ADDR: not set.*scontrol.*slurm/pretrain.sbatch") as caught:
        read_world()
    LOG.error(caught.value)
    assert capsys.readouterr().err.startswith("error on rank 5: MASTER_ADDR: not set"), "as Slurm numbers it"


def test_one_srun_task_needs_none(bare: pytest.MonkeyPatch) -> None:
    set_environment(bare, {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    bare.delenv("MASTER_ADDR")
    assert (read_world().size, os.environ["MASTER_ADDR"]) == (1, "127.0.0.1")


def test_a_launcher_inside_a_job_wins_over_slurm(bare: pytest.MonkeyPatch) -> None:
    ours = dict(zip(VARIABLES, ("1", "1", "2", "127.0.0.1", "29500"), strict=True))
    set_environment(bare, {**SLURM, **ours})
    assert (read_world().rank, read_world().size) == (1, 2)


def test_a_shell_in_an_allocation_is_a_world_of_one(bare: pytest.MonkeyPatch) -> None:
    """The batch script itself has SLURM_PROCID but runs in no step."""
    set_environment(bare, {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"})
    assert (read_world().rank, read_world().size) == (0, 1)


def test_incomplete_variables_are_named(bare: pytest.MonkeyPatch) -> None:
    set_environment(bare, {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT: not set although RANK is"):
        read_world()


def test_incomplete_variables_are_one_error(run_pretrain: Pretrain, tiny_config: Path) -> None:
    outcome = run_pretrain(tiny_config, "incomplete", SHORT, launcher="python", env={"RANK": "0"})
    assert outcome.code == 2
    assert outcome.stderr.startswith("error: LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: not set")
    assert len(outcome.stderr.splitlines()) == 1


def test_a_taken_port_is_one_error(run_pretrain: Pretrain, tiny_config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = dict(zip(VARIABLES, ("0", "0", "2", "127.0.0.1", port), strict=True))
        outcome = run_pretrain(tiny_config, "port", SHORT, launcher="python", env=env)
        alone = run_pretrain(tiny_config, "no_port", SHORT, launcher="python", env={**env, "WORLD_SIZE": "1"})
    assert alone.code == 0, "who is alone meets nobody"
    assert outcome.code == 2
    assert "Traceback" not in outcome.stderr
    assert f"error: 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT): the ranks cannot meet there" in outcome.stderr
    assert "give the launcher another --master_port, or under Slurm export another MASTER_PORT" in outcome.stderr


def test_a_run_that_has_trained_may_try_again_where_gpus_or_ranks_are_missing(
    run_pretrain: Pretrain, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attempt may get other nodes; before there is a checkpoint, whoever started it looks on."""
    no_gpu = {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0", "DS_ACCELERATOR": ""}
    outcome = run_pretrain(tiny_config, "again", SHORT, ranks=1, env=no_gpu)
    assert outcome.code == 2, outcome.stderr
    assert "error: SLURM_GPUS_ON_NODE = 8, but torch" in outcome.stderr
    assert run_pretrain(tiny_config, "again", SHORT, ranks=1).code == 0

    longer = [*SHORT, "train.steps=4"]
    in_job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n3"}
    outcome = run_pretrain(tiny_config, "again", longer, ranks=1, env={**no_gpu, **in_job})
    assert outcome.code == UNREACHED, outcome.stderr
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert accused(outcome.run.folder / "slurm", ["n1", "n3"]) == {"n3": LACKING}, "the job goes on without it"
    monkeypatch.delenv("SLURM_JOB_ID")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = dict(zip(VARIABLES, ("0", "0", "2", "127.0.0.1", str(taken.getsockname()[1])), strict=True))
        outcome = run_pretrain(tiny_config, "again", longer, launcher="python", env=env)
    assert outcome.code == UNREACHED, outcome.stderr


def test_a_missing_compiler_is_one_error(run_pretrain: Pretrain, tiny_config: Path) -> None:
    env = {"CXX": "/nonexistent/c++"}
    outcome = run_pretrain(tiny_config, "compiler", SHORT, launcher="python", fresh=True, env=env)
    assert outcome.code == 2
    assert outcome.stderr.startswith("error: C++ compiler '/nonexistent/c++' not found")
    assert "install g++" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_a_stale_build_lock_does_not_hang(
    run_pretrain: Pretrain, tiny_config: Path, tmp_path: Path, alone: dict[int, float]
) -> None:
    """What a start that was killed while it compiled leaves behind makes torch wait for ever."""
    shutil.copytree(extensions_folder(), tmp_path / "extensions")  # compiled by `alone` at the latest
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.touch()
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    outcome = run_pretrain(tiny_config, "stale_lock", SHORT, launcher="python", fresh=True, env=env)
    assert outcome.code == 0, outcome.stderr
    assert outcome.run.column("loss") == alone
    assert not lock.exists()
