"""Each rank gets the device that is its own, and DeepSpeed the same one; what contradicts the host is refused.

No GPU is here: how many torch sees is patched, and DeepSpeed's own code says which device it would take.
"""

import os

import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from plumbline.launcher.runtime.ranks import world
from plumbline.launcher.runtime.ranks.world import MissingGPUError, read_world

TASK = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8",
    "MASTER_ADDR": "node1", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
}  # fmt: skip
RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


class Host:
    """Hold what a process finds: its variables, and how many GPUs torch shows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        ours = (*RANK, "SLURM", "DS_")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        monkeypatch.setattr(os, "environ", clean)

    def shows(self, gpus: int, variables: dict[str, str]) -> None:
        os.environ.update(variables)
        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        self.monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


@pytest.mark.parametrize(("gpus", "device"), [(1, "cuda:0"), (8, "cuda:1")])
def test_deepspeed_takes_the_gpu_that_slurm_gave_the_task(host: Host, gpus: int, device: str) -> None:
    """With --gpus-per-task a task sees its own GPU alone; it stays the second task of its host."""
    host.shows(gpus, TASK)
    found = read_world()
    assert (found.rank, found.local_rank, found.size, str(found.device)) == (5, 1, 8, device)
    assert CUDA_Accelerator().device_name(os.environ["LOCAL_RANK"]) == device


def test_steps_of_a_job_that_run_at_once_have_ports_of_their_own(host: Host) -> None:
    ports = set()
    for step in ("0", "1", "2"):
        for name in (*RANK, "SLURM_STEP_ID"):
            os.environ.pop(name, None)
        host.shows(0, {**TASK, "MASTER_ADDR": "n1", "SLURM_STEP_ID": step})
        read_world()
        ports.add(os.environ["MASTER_PORT"])
    assert len(ports) == 3


def test_a_launcher_inside_a_task_with_one_gpu_starts_too_many(host: Host) -> None:
    """Two ranks of torchrun in one task must not share a GPU without a word."""
    host.shows(1, {**TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", **RANK})
    with pytest.raises(ValueError, match=r"LOCAL_RANK = 1: this node shows 1 GPU\(s\); start one process for each"):
        read_world()


def test_more_ranks_than_gpus_are_refused(host: Host) -> None:
    host.shows(1, RANK)
    with pytest.raises(ValueError, match=r"LOCAL_RANK = 1: this node shows 1 GPU"):
        read_world()


def test_on_a_cpu_the_local_rank_stays(host: Host) -> None:
    host.shows(0, TASK)
    found = read_world()
    assert (found.device.type, found.local_rank, os.environ["LOCAL_RANK"]) == ("cpu", 1, "1")


@pytest.mark.parametrize(("gpus", "accelerator"), [(8, "cpu"), (0, "cuda"), (8, "xpu")])
def test_another_accelerator_than_the_hosts_is_refused(host: Host, gpus: int, accelerator: str) -> None:
    host.shows(gpus, {**RANK, "DS_ACCELERATOR": accelerator})
    with pytest.raises(
        ValueError, match=rf"DS_ACCELERATOR = {accelerator}, and this host shows {gpus} GPU\(s\): unset"
    ):
        read_world()


@pytest.mark.parametrize(("gpus", "accelerator"), [(0, "cpu"), (8, "cuda")])
def test_the_hosts_own_accelerator_may_be_named(host: Host, gpus: int, accelerator: str) -> None:
    host.shows(gpus, {**RANK, "DS_ACCELERATOR": accelerator})
    assert read_world().device.type == accelerator


def test_a_job_with_gpus_does_not_train_on_cpus(host: Host) -> None:
    """Its torch may be one for CPUs, or too new for the driver: all ranks agree then, and nothing else would tell."""
    host.shows(0, {**TASK, "SLURM_GPUS_ON_NODE": "8"})
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with pytest.raises(
        ValueError, match=r"SLURM_GPUS_ON_NODE = 8, but torch \S+ sees no GPU on \S+: look at nvidia-smi"
    ):
        read_world()
    for hidden in ("", "-1", "NoDevFiles"):
        os.environ["CUDA_VISIBLE_DEVICES"] = hidden
        assert read_world().device.type == "cpu"


@pytest.mark.parametrize("variables", [{"DS_ACCELERATOR": "cpu"}, {"SLURM_GPUS_ON_NODE": "0"}])
def test_cpus_of_a_job_may_be_meant(host: Host, variables: dict[str, str]) -> None:
    host.shows(0, {"SLURM_GPUS_ON_NODE": "8", **TASK, **variables})
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    assert read_world().device.type == "cpu"


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"RANK": "8", "LOCAL_RANK": "0"}, 1), ({"LOCAL_RANK": "1"}, 0), ({"RANK": "0", "SLURM_JOB_ID": "7"}, 0)],
)
def test_a_host_whose_gpus_torch_does_not_see_is_worth_a_warning(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variables: dict[str, str], said: int
) -> None:
    host.shows(0, {**RANK, "WORLD_SIZE": "16", **variables})
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    monkeypatch.setattr(world, "has_gpus", lambda **_: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert read_world().device.type == "cpu"
    assert ["this host has GPUs, but torch" in record.message for record in caplog.records] == [True] * said


def test_one_of_several_ranks_is_not_left_on_the_cpu_of_a_host_with_gpus(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for it on theirs: with another backend it meets nobody."""
    host.shows(0, {**RANK, "WORLD_SIZE": "16"})
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    monkeypatch.setattr(world, "has_gpus", lambda **_: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(MissingGPUError, match="this host has GPUs, but torch"):
        read_world()
    monkeypatch.setattr(world, "has_gpus", lambda files=("dxg",): files != ("nvidia0",))  # as under Windows
    assert read_world().device.type == "cpu"
    monkeypatch.setattr(world, "has_gpus", lambda **_: True)
    os.environ["WORLD_SIZE"], os.environ["RANK"] = "1", "0"
    assert read_world().device.type == "cpu"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two': expected a number"),
        ({"RANK": ""}, "RANK = '': expected a number"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE = 0"),
        ({"RANK": "8"}, "RANK = 8"),
        ({"RANK": "-1"}, "RANK = -1"),
        ({"LOCAL_RANK": "-2"}, "LOCAL_RANK = -2"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT = 99999"),
    ],
)
def test_a_place_that_no_rank_has_is_refused(host: Host, variables: dict[str, str], words: str) -> None:
    host.shows(0, {**RANK, **variables})
    with pytest.raises(ValueError, match=words):
        read_world()
