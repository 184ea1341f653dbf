"""Join and leave the process group of all ranks."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from plumbline.launcher.runtime.ranks.deepspeed_start import (
    ask_torch_for_free_memory,
    compile_start_up_operator,
    import_deepspeed,
    release_shared_memory,
)
from plumbline.launcher.runtime.ranks.memory import keep_freed_memory
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.open_files import allow_many_files
from plumbline.launcher.runtime.system.threads import host_threads

LOOPBACK = "127."
ELSEWHERE = "192.0.2.1"
"""An address that is never assigned (RFC 5737), so it is outside this host and its network."""
OTHER_PORT = "give the launcher another --master_port, or under Slurm export another MASTER_PORT"


class UnmetError(ValueError):
    """Signal that ranks cannot form a group, because of their configuration, a broken node or the network."""


def join(world: World, timeout_minutes: float) -> None:
    """Join the process group (NCCL on GPUs, gloo on CPUs).

    Raises:
        ValueError: there is no C++ compiler for DeepSpeed's start-up operator.
        UnmetError: the ranks cannot meet.
    """
    with quiet_stdout():
        _set_up_host(world)
        import_deepspeed()
        ask_torch_for_free_memory()
        listen_where_others_reach()
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        with _naming_what_failed(backend):
            _meet(world, backend, timedelta(minutes=timeout_minutes))


def _set_up_host(world: World) -> None:
    """Prepare this process for its device, before DeepSpeed looks at it."""
    os.environ["DS_ACCELERATOR"] = world.device.type  # else DeepSpeed chooses by what it finds
    threads = host_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    if world.device.type == "cpu":
        # The first call of a thread into MKL (exp, cos, ...) can round differently from all later ones
        # (seen with torch 2.13, two threads): make it here, or the first step after a resume may differ in a bit
        torch.ones(2**20).exp()
        keep_freed_memory()
        compile_start_up_operator()
    else:
        torch.cuda.set_device(world.device)
        set_up_nccl()
    allow_many_files()


def set_up_nccl() -> None:
    """Tell torch's own threads around NCCL to leave errors to this process, unless the environment says otherwise."""
    # A thread that watches collectives would abort the process (exit code 134) when a GPU breaks, before the step that
    # used the GPU can say so, end with a code of its own and have the node left out
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    # Another thread looks at rank 0's store every second, and warns each time once rank 0 has ended with an error
    os.environ.setdefault("TORCH_NCCL_COORD_CHECK_MILSEC", "10000")


def _meet(world: World, backend: str, timeout: timedelta) -> None:
    """Create the groups of all ranks, torch's and DeepSpeed's. Collective."""
    import deepspeed
    from deepspeed.utils import groups

    if world.size == 1:  # no port, which another process might take first
        store = dist.HashStore()  # type: ignore[attr-defined]
        gpu = world.device if backend == "nccl" else None
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=gpu)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    # DeepSpeed would create a group with the backend's default timeout: ten minutes under NCCL
    groups._WORLD_GROUP = dist.new_group(timeout=timeout)
    release_shared_memory(world)


@contextmanager
def _naming_what_failed(backend: str) -> Iterator[None]:
    """Turn the errors of ranks that cannot meet into an `UnmetError` with the remedy."""
    try:
        yield
    except dist.DistBackendError as error:
        raise UnmetError(
            f"the ranks cannot form a group over {backend}: {_first_line(error)}; NCCL_DEBUG=INFO says more, and "
            "launcher/doctor.py names what is broken"
        ) from error
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UnmetError(
            f"{address} (MASTER_ADDR:MASTER_PORT): the ranks cannot meet there; if another process has the "
            f"port, {OTHER_PORT}. {_first_line(error)}"
        ) from error
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        raise UnmetError(_without_gloo(error)) from error


def gloo_group(timeout_minutes: float) -> dist.ProcessGroup:
    """Return a new gloo group of all ranks, which threads may use in parallel to training. Collective.

    Raises:
        UnmetError: the ranks cannot form it.
    """
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
    except RuntimeError as error:
        raise UnmetError(_without_gloo(error)) from error
    return group


def _without_gloo(error: Exception) -> str:
    """Return the message and remedy for ranks that cannot form a gloo group, for which torch has no error class."""
    return (
        f"the ranks cannot form a group over gloo: {_first_line(error)}; gloo listens where the host's own name leads: "
        "set GLOO_SOCKET_IFNAME to the interface by which nodes reach each other (`ip -brief address` lists them)"
    )


def listen_where_others_reach() -> None:
    """Make gloo use the interface towards MASTER_ADDR if the host's own name resolves to a loopback address.

    gloo tells other ranks the address of the host's name, which in Debian's /etc/hosts is 127.0.1.1: they would look
    for it on their own host. If MASTER_ADDR is that name, the interface towards outside addresses is used.
    """
    with suppress(OSError):  # unresolvable names, no IPv4: gloo decides
        if "GLOO_SOCKET_IFNAME" in os.environ or not socket.gethostbyname(socket.gethostname()).startswith(LOOPBACK):
            return
        address = _address_towards(os.environ["MASTER_ADDR"])
        if address.startswith(LOOPBACK) and os.environ["MASTER_ADDR"] == socket.gethostname():
            address = _address_towards(ELSEWHERE)
        for name, known in psutil.net_if_addrs().items():
            if not address.startswith(LOOPBACK) and address in [each.address for each in known]:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_towards(host: str) -> str:
    """Return the address of this host as another host sees it, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Keep messages of DeepSpeed and compilers off standard output; errors still reach standard error.

    With NCCL_DEBUG, NCCL logs to standard output; then everything goes to standard error.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    sink = os.dup(2) if "NCCL_DEBUG" in os.environ else os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.close(sink)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def leave() -> None:
    """Leave the process group together: a launcher may kill the other ranks soon after the first has ended."""
    dist.barrier()
    dist.destroy_process_group()
