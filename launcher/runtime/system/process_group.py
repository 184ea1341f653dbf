"""Join the process group of all ranks and leave it, with DeepSpeed prepared and quiet."""

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

from plumbline.launcher.runtime.system.files import one_at_a_time
from plumbline.launcher.runtime.system.memory import keep_freed_memory
from plumbline.launcher.runtime.system.open_files import allow_many_files
from plumbline.launcher.runtime.system.threads import host_threads
from plumbline.launcher.runtime.system.world import World

LOOPBACK = "127."
ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737), and so beyond this host and its network."""
OTHER_PORT = "give the launcher another --master_port, or under Slurm export another MASTER_PORT"
SHARED_MEMORY = "/dev/shm"
SAID_OTHERWISE = ("Skipping step", "untested optimizer")
"""What DeepSpeed warns of beside us: training says itself at which step an update was skipped, and our optimizers that
DeepSpeed does not know are tested at the stages that we permit."""
UNFUSED = "Mismatch dtype between input and weight"
"""What torch warns of where autocast (bf16 at ZeRO-0) leaves the weights of a norm in fp32, as it is meant to be."""


class UnmetError(ValueError):
    """Say that ranks cannot form a group: as they are configured, or because a node or the network is broken."""


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
    os.environ["DS_ACCELERATOR"] = world.device.type  # not what else DeepSpeed may find on this host
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
    allow_many_files()


def _import_deepspeed() -> None:
    """Import DeepSpeed, and let it and torch say nothing that users cannot act on."""
    import deepspeed  # after DS_ACCELERATOR is set: DeepSpeed reads it when it is imported

    with definitions_uncompiled():
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    theirs = logging.getLogger("DeepSpeed")  # prints on every rank, and to standard output
    theirs.handlers.clear()
    theirs.propagate = True
    theirs.setLevel(logging.WARNING)
    theirs.addFilter(lambda record: not any(words in record.getMessage() for words in SAID_OTHERWISE))
    # DeepSpeed calls collectives by their old names, of which the newest torch warns; users cannot act on it
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")  # which is the one set above
    warnings.filterwarnings("ignore", message=UNFUSED)


def _meet(world: World, backend: str, timeout: timedelta) -> None:
    """Make the groups of all ranks, torch's and DeepSpeed's. Collective."""
    import deepspeed
    from deepspeed.utils import groups

    if world.size == 1:  # nobody to meet, so no port, which another process may take before we do
        store = dist.HashStore()  # type: ignore[attr-defined]
        gpu = world.device if backend == "nccl" else None
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=gpu)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    # DeepSpeed would make one of all ranks for itself, with the backend's default: ten minutes under NCCL
    groups._WORLD_GROUP = dist.new_group(timeout=timeout)
    release_shared_memory(world)


@contextmanager
def _naming_what_failed(backend: str) -> Iterator[None]:
    """Turn the errors of ranks that cannot meet into an `UnmetError` that says what helps."""
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
    """Let functions that are marked for torch.compile be defined as they are written.

    DeepSpeed marks those of its Muon (0.19.8), which nobody here calls, and looks at them whenever it starts. The mark
    alone has torch import its compiler, which takes seconds, and only ranks that compile blocks need it.
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
    """Return a new group of all ranks over gloo, which threads may use beside training's. Collective.

    Raises:
        UnmetError: they cannot form it.
    """
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
    except RuntimeError as error:
        raise UnmetError(_without_gloo(error)) from error
    return group


def _without_gloo(error: Exception) -> str:
    """Say that ranks cannot form a group over gloo, whose errors torch gives no kind of their own, and what helps."""
    return (
        f"the ranks cannot form a group over gloo: {_first_line(error)}; gloo listens where the host's own name leads: "
        "set GLOO_SOCKET_IFNAME to the interface by which nodes reach each other (`ip -brief address` lists them)"
    )


def listen_where_others_reach() -> None:
    """Let gloo take the interface towards MASTER_ADDR where the host's own name leads to itself alone.

    gloo tells other ranks the address that the own name stands for, which by Debian's /etc/hosts is 127.0.1.1: they
    would look for this host on their own. Where MASTER_ADDR is that name, it is the interface towards everybody else.
    """
    with suppress(OSError):  # names that lead nowhere, no IPv4: then gloo decides as ever
        if "GLOO_SOCKET_IFNAME" in os.environ or not socket.gethostbyname(socket.gethostname()).startswith(LOOPBACK):
            return
        address = _address_towards(os.environ["MASTER_ADDR"])
        if address.startswith(LOOPBACK) and os.environ["MASTER_ADDR"] == socket.gethostname():
            address = _address_towards(ELSEWHERE)
        for name, known in psutil.net_if_addrs().items():
            if not address.startswith(LOOPBACK) and address in [each.address for each in known]:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_towards(host: str) -> str:
    """Return the address of this host that another sees; nothing is sent to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def release_shared_memory(world: World) -> None:
    """Take away the name of this rank's buffer in shared memory, which all ranks of a host have opened by now.

    DeepSpeed makes 66 MiB for each rank on CPUs, and leaves them there for good (0.19.8): run after run, memory of the
    host that only a restart gives back. What has no name is gone with the last process that has it open.
    """
    names = (os.getuid(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), world.rank)
    Path(SHARED_MEMORY, f"deepspeed_allreduce_buffer_{'_'.join(map(str, names))}").unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def ask_torch_for_free_memory() -> None:
    """Let DeepSpeed ask torch, and not NVML, how much memory of a GPU is free.

    For NVML it reads CUDA_VISIBLE_DEVICES as numbers (0.19.8), at stages 1 and 2, and names of GPUs (GPU-..., MIG-...)
    end the start there. It asks before it makes its buffers, when memory is either ours or free.
    """
    from deepspeed.accelerator import cuda_accelerator

    cuda_accelerator.pynvml = None


def compile_start_up_operator() -> None:
    """Build the C++ operator that DeepSpeed compiles inside init_distributed on CPU, before anyone waits for anyone.

    torch's own lock for such builds is a plain file: killed in the middle, it makes every later process wait for ever,
    in silence. Here one process of a host builds at a time, under a lock that the kernel releases when its holder dies,
    so a lock file that is there while we hold ours is stale by construction. The folder is specific to host, torch,
    DeepSpeed and Python environment: objects are compiled for the processor they are built on, and two environments
    with one folder would build anew, for a minute, whenever they take turns.
    """
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise ValueError(
            f"C++ compiler {os.environ.get('CXX', 'c++')!r} not found: DeepSpeed compiles one operator when it starts "
            "on CPU; install g++ (Debian and Ubuntu: apt-get install g++) or point CXX at a compiler"
        )
    # ninja, which builds the operator, is beside the interpreter when the virtual environment is not activated
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
    """Return where torch builds operators: TORCH_EXTENSIONS_DIR, or a folder of this host and Python environment."""
    from deepspeed import __version__ as deepspeed_version

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "plumbline" / "torch_extensions"
    versions = re.sub(r"[^\w.-]", "_", f"{socket.gethostname()}-torch{torch.__version__}-deepspeed{deepspeed_version}")
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", cache / f"{versions}-{environment}"))


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Keep the chatter of DeepSpeed and of compilers off standard output; errors still reach standard error.

    Where NCCL_DEBUG asks NCCL to speak, which it does on standard output, all of it goes to standard error.
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
    """Leave the process group, all ranks together: a launcher may end the others soon after the first has left."""
    dist.barrier()
    dist.destroy_process_group()
