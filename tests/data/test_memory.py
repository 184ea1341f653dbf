"""Memory of batches: lent again once nobody holds a part of it, and never before."""

import gc

import numpy as np
import numpy.typing as npt
import torch

from plumbline.data.memory import Memory

Bytes = npt.NDArray[np.uint8]


def address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_lent_again_once_nobody_holds_it() -> None:
    memory = Memory(kept=1)
    first = memory.lend(800)
    where, part = address(first), torch.from_numpy(first.view(np.int64).reshape(10, 10)).split(3)[1][:, 2:]
    del first
    gc.collect()
    part.fill_(7)
    other = memory.lend(800)
    other[:] = 1
    assert (part == 7).all(), "a part of it is still held"
    del part
    gc.collect()
    assert address(memory.lend(400)) == where
