"""Measure the memory of a rank's device, and make the host's allocator keep freed memory."""

import ctypes
import os

import psutil
import torch

from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.threads import ranks_on_this_host

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
KEPT = 2**30
"""Bytes at the end of the heap that the process keeps."""


def device_bytes(world: World) -> float:
    """Return the bytes of memory of this rank's GPU, or its even share of the host's memory."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    return psutil.virtual_memory().total / ranks_on_this_host(os.environ)


def free_bytes(world: World) -> float:
    """Return the bytes of this rank's GPU that are free or reserved for tensors.

    The rest belongs to other processes, CUDA and NCCL: two groups of all ranks exist before the model does.
    """
    free, _ = torch.cuda.mem_get_info(world.device)
    return float(free + torch.cuda.memory_reserved(world.device))


def keep_freed_memory() -> None:
    """Keep freed memory, only under glibc, which by default returns every tensor above 32 MiB to the kernel.

    The next step then gets it back zeroed, with one page fault per 4 KiB: for activations, gradients and DeepSpeed's
    buckets, in every step. Keeping it does not always help: because of alignment, a freed block may be slightly too
    small for the next tensor of the same size, depending on what else was allocated. Numbers are the same. PyTorch's
    guide for CPUs recommends other allocators for the same reason.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, KEPT)
