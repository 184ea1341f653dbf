"""Copies of weights for checkpoints."""

import torch

from plumbline.launcher.runtime.checkpoint.tensors import host_memory


def test_memory_that_cannot_be_pinned_is_ordinary_memory() -> None:
    """Nothing can be pinned without a GPU."""
    memory = host_memory((2, 3), pinned=True)
    assert (memory.shape, memory.dtype) == ((2, 3), torch.float32)
    assert memory.is_pinned() == torch.cuda.is_available()
