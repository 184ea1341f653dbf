"""What a process asks of its system before ranks meet."""

import json
import os
import resource
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.ranks.process_group import (
    ELSEWHERE,
    UnmetError,
    ask_torch_for_free_memory,
    gloo_group,
    join,
    listen_where_others_reach,
    set_up_nccl,
)
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.open_files import MANY_FILES, allow_many_files
from tests.conftest import PATIENCE, environment

STARTED = """
import json, sys
from plumbline.launcher.runtime.ranks import process_group, world
process_group.join(world.read_world(), 1.0)
import deepspeed.runtime.zero.stage3, deepspeed.runtime.zero.stage_1_and_2
from deepspeed.runtime.zero.muon.muon_optimizer import muon_update
compilers = {"torch._dynamo.convert_frame", "torch._inductor.compile_fx"}
print(json.dumps([muon_update.__name__, sorted(compilers & set(sys.modules))]))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "asked"),
    [
        (1024, 2**20, [(MANY_FILES, 2**20)]),
        (1024, resource.RLIM_INFINITY, [(MANY_FILES, resource.RLIM_INFINITY)]),
        (1024, 4096, [(4096, 4096)]),
        (4096, 4096, []),
        (2**20, 2**20, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_as_many_files_as_ranks_need_where_that_is_allowed(
    soft: int, hard: int, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, limits: found.append(limits))
    allow_many_files()
    assert found == asked


def test_every_command_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(limits[1], MANY_FILES) - 1 if limits[1] != resource.RLIM_INFINITY else 1024
    monkeypatch.setattr(cli, "interrupts", lambda: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        cli.begin(lambda: None)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_gpus_may_be_visible_by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed counts the free memory of one as its stages 1 and 2 do, where NVML is installed."""
    from deepspeed.accelerator import cuda_accelerator

    monkeypatch.setattr(cuda_accelerator, "pynvml", SimpleNamespace(nvmlDeviceGetHandleByIndex=None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a1c0e9b,MIG-4f3b2a10")
    gpu = cuda_accelerator.CUDA_Accelerator.__new__(cuda_accelerator.CUDA_Accelerator)
    monkeypatch.setattr(gpu, "total_memory", lambda _index: 80)
    monkeypatch.setattr(gpu, "memory_allocated", lambda _index: 30)
    with pytest.raises(ValueError, match="GPU-5a1c0e9b"):
        gpu.available_memory(0)
    ask_torch_for_free_memory()
    assert gpu.available_memory(0) == 50


@pytest.mark.parametrize(
    ("own", "towards", "given", "taken"),
    [
        ("127.0.1.1", "10.0.0.7", None, "ib0"),  # as Debian's /etc/hosts has it
        ("10.0.0.7", "10.0.0.7", None, None),  # gloo finds that by itself
        ("127.0.1.1", "127.0.0.1", None, None),  # all ranks are on this host
        ("127.0.1.1", "10.0.0.7", "eth9", "eth9"),
        ("127.0.1.1", "10.0.0.8", None, None),  # no interface is known by it
        ("127.0.1.1", "127.0.1.1", None, "ib0"),  # MASTER_ADDR is the own name, which means something else to others
    ],
)
def test_gloo_listens_where_other_hosts_reach_it(
    own: str, towards: str, given: str | None, taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            self.found = "10.0.0.7" if address[0] == ELSEWHERE else towards

        def getsockname(self) -> tuple[str, int]:
            return self.found, 40000

    interfaces = {"lo": [SimpleNamespace(address="127.0.0.1")], "ib0": [SimpleNamespace(address="10.0.0.7")]}
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: own)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1" if towards == own else "node2")
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    if given is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = given
    listen_where_others_reach()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == taken


def test_a_name_that_leads_nowhere_is_left_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(_name: str) -> str:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", nowhere)
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    listen_where_others_reach()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_ranks_that_cannot_meet_over_gloo_are_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:144] no error\nException raised from ...")

    monkeypatch.setattr(dist, "new_group", fail)
    with pytest.raises(UnmetError, match=r"over gloo: Gloo connectFull.*set GLOO_SOCKET_IFNAME to"):
        gloo_group(30)


@pytest.mark.parametrize(
    ("said", "error"), [("Gloo connectFullMesh failed with [pair.cc:144]", UnmetError), ("a bug", RuntimeError)]
)
def test_training_over_gloo_says_so_as_well(said: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(os, "environ", {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    monkeypatch.setattr(deepspeed, "init_distributed", fail)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    with pytest.raises(error, match=said[:4]):
        join(World(0, 0, 2, torch.device("cpu")), timeout_minutes=1)


def test_a_rank_that_compiles_nothing_imports_no_compiler() -> None:
    """DeepSpeed's own Muon would: its functions are compiled where they are defined."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    muon, compilers = json.loads(done.stdout)
    assert muon == "muon_update"
    assert compilers == []


def test_a_broken_gpu_is_left_to_python_unless_the_user_wants_it_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_COORD_CHECK_MILSEC"):
        monkeypatch.setenv(name, "to be restored")
    monkeypatch.delenv("TORCH_NCCL_RETHROW_CUDA_ERRORS")
    set_up_nccl()
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_COORD_CHECK_MILSEC"] == "to be restored"
