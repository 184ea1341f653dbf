"""Join and leave the process group of all ranks, and prepare and silence DeepSpeed."""

import hashlib
import logging
import os
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from plumbline.launcher.runtime.ranks.memory import keep_freed_memory
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.files import one_at_a_time
from plumbline.launcher.runtime.system.open_files import allow_many_files
from plumbline.launcher.runtime.system.threads import host_threads

LOOPBACK = "127."
ELSEWHERE = "192.0.2.1"
"""An address that is never assigned (RFC 5737), so it is outside this host and its network."""
OTHER_PORT = "give the launcher another --master_port, or under Slurm export another MASTER_PORT"
SHARED_MEMORY = "/dev/shm"
SAID_OTHERWISE = ("Skipping step", "untested optimizer")
"""Warnings of DeepSpeed to suppress: training itself reports skipped updates, and our optimizers that DeepSpeed does
not know are tested at the stages that we permit."""
UNFUSED = "Mismatch dtype between input and weight"
"""Warning of torch where autocast (bf16 at ZeRO-0) leaves a norm's weights in fp32, which is intended."""


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
        _import_deepspeed()
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


def _import_deepspeed() -> None:
    """Import DeepSpeed, and suppress messages of DeepSpeed and torch that users cannot act on."""
    import deepspeed  # after DS_ACCELERATOR is set: DeepSpeed reads it when it is imported

    with definitions_uncompiled():
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    theirs = logging.getLogger("DeepSpeed")  # prints on every rank, and to standard output
    theirs.handlers.clear()
    theirs.propagate = True
    theirs.setLevel(logging.WARNING)
    theirs.addFilter(lambda record: not any(words in record.getMessage() for words in SAID_OTHERWISE))
    # DeepSpeed calls collectives by deprecated names, of which new versions of torch warn
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")  # which is the one set above
    warnings.filterwarnings("ignore", message=UNFUSED)


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


@contextmanager
def definitions_uncompiled() -> Iterator[None]:
    """Define functions decorated with torch.compile without compiling them.

    DeepSpeed decorates functions of its Muon (0.19.8), which is not used here, and always imports it. The decorator
    makes torch import its compiler, which takes seconds, and which only ranks that compile blocks need.
    """

    def as_written(function: Any = None, **_options: Any) -> Any:
        return (lambda other: other) if function is None else function

    original = torch.compile
    setattr(torch, "compile", as_written)  # noqa: B010 - a function of another type, to mypy
    try:
        yield
    finally:
        setattr(torch, "compile", original)  # noqa: B010


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


def release_shared_memory(world: World) -> None:
    """Unlink this rank's buffer in shared memory, which all ranks of the host have opened by now.

    DeepSpeed creates 66 MiB per rank on CPUs and never removes them (0.19.8): every run takes host memory until the
    next reboot. An unlinked buffer is freed with the last process that has it open.
    """
    names = (os.getuid(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), world.rank)
    Path(SHARED_MEMORY, f"deepspeed_allreduce_buffer_{'_'.join(map(str, names))}").unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def ask_torch_for_free_memory() -> None:
    """Make DeepSpeed ask torch instead of NVML how much memory of a GPU is free.

    For NVML it reads CUDA_VISIBLE_DEVICES as numbers (0.19.8) at stages 1 and 2, and fails on names of GPUs (GPU-...,
    MIG-...). It asks before it allocates its buffers, when memory is either ours or free.
    """
    from deepspeed.accelerator import cuda_accelerator

    cuda_accelerator.pynvml = None


def compile_start_up_operator() -> None:
    """Build the C++ operator that DeepSpeed compiles inside init_distributed on CPU, before ranks wait for each other.

    torch's own lock for such builds is a plain file: if a build is killed, every later process silently waits forever.
    Here one process per host builds at a time, under a lock that the kernel releases when its holder dies, so torch's
    lock file is stale if it exists while we hold ours. The folder is specific to host, torch, DeepSpeed and Python
    environment: objects are compiled for the processor they are built on, and two environments that share a folder
    would rebuild, for a minute, whenever they alternate.
    """
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise ValueError(
            f"C++ compiler {os.environ.get('CXX', 'c++')!r} not found: DeepSpeed compiles one operator when it starts "
            "on CPU; install g++ (Debian and Ubuntu: apt-get install g++) or point CXX at a compiler"
        )
    # If the virtual environment is not activated, ninja is found beside the interpreter
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    from deepspeed.accelerator import get_accelerator

    folder = extensions_folder()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(folder / "plumbline.lock"):
        for stale in folder.glob("*/lock"):
            stale.unlink(missing_ok=True)
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None:
            builder.load(verbose=False)


def extensions_folder() -> Path:
    """Return where torch builds operators: TORCH_EXTENSIONS_DIR, or a folder for this host and Python environment."""
    from deepspeed import __version__ as deepspeed_version

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plumbline" / "torch_extensions"
    versions = re.sub(r"[^\w.-]", "_", f"{socket.gethostname()}-torch{torch.__version__}-deepspeed{deepspeed_version}")
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", cache / f"{versions}-{environment}"))


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
