"""Prepare DeepSpeed before ranks meet: import it, silence it, and mend what its start-up does to a host."""

import hashlib
import logging
import os
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from plumbline.data.paths import user_cache
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.files import one_at_a_time

SHARED_MEMORY = "/dev/shm"
SAID_OTHERWISE = ("Skipping step", "untested optimizer")
"""Warnings of DeepSpeed to suppress: training itself reports skipped updates, and our optimizers that DeepSpeed does
not know are tested at the stages that we permit."""
UNFUSED = "Mismatch dtype between input and weight"
"""Warning of torch where autocast (bf16 at ZeRO-0) leaves a norm's weights in fp32, which is intended."""


def import_deepspeed() -> None:
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

    cache = user_cache() / "torch_extensions"
    versions = re.sub(r"[^\w.-]", "_", f"{socket.gethostname()}-torch{torch.__version__}-deepspeed{deepspeed_version}")
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", cache / f"{versions}-{environment}"))


def release_shared_memory(world: World) -> None:
    """Unlink this rank's buffer in shared memory, which all ranks of the host have opened by now.

    DeepSpeed creates 66 MiB per rank on CPUs and never removes them (0.19.8): every run takes host memory until the
    next reboot. An unlinked buffer is freed with the last process that has it open.
    """
    names = (os.getuid(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), world.rank)
    Path(SHARED_MEMORY, f"deepspeed_allreduce_buffer_{'_'.join(map(str, names))}").unlink(missing_ok=True)
