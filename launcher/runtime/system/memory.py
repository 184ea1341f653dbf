"""Know how much memory a rank's device has; and let the allocator of the host keep what tensors free there."""

import ctypes
import os

import psutil
import torch

from plumbline.launcher.runtime.system.threads import ranks_on_this_host
from plumbline.launcher.runtime.system.world import World

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
KEPT = 2**30
"""Bytes at the end of the heap that stay with the process."""


def device_bytes(world: World) -> float:
    """Return the memory of this rank's device: of its GPU, or its even share of the host's, in bytes."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    return psutil.virtual_memory().total / ranks_on_this_host(os.environ)


def free_bytes(world: World) -> float:
    """Return the memory of this rank's GPU that is free, or that tensors may have, in bytes.

    The rest is other processes', and CUDA's and NCCL's own: two groups of all ranks are there before the model is.
    """
    free, _ = torch.cuda.mem_get_info(world.device)
    return float(free + torch.cuda.memory_reserved(world.device))


def keep_freed_memory() -> None:
    """Keep what is freed; only under glibc, whose own rule is to give every tensor above 32 MiB back to the kernel.

    The next step then takes it from there again, zeroed, in one fault for every 4 KiB: activations, gradients and
    DeepSpeed's buckets, in every step. It does not always help: tensors are aligned, and what one has left may be too
    small for the next of its size by what that takes, by chance of what else was allocated. Numbers are the same.
    PyTorch's guide for CPUs recommends other allocators for the same reason.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, KEPT)
