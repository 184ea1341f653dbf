"""What a process asks of its system before ranks meet."""

import os
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from plumbline.launcher.runtime.ranks.process_group import (
    ELSEWHERE,
    UnmetError,
    gloo_group,
    join,
    listen_where_others_reach,
    set_up_nccl,
)
from plumbline.launcher.runtime.ranks.world import World


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


def test_a_broken_gpu_is_left_to_python_unless_the_user_wants_it_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_COORD_CHECK_MILSEC"):
        monkeypatch.setenv(name, "to be restored")
    monkeypatch.delenv("TORCH_NCCL_RETHROW_CUDA_ERRORS")
    set_up_nccl()
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_COORD_CHECK_MILSEC"] == "to be restored"
