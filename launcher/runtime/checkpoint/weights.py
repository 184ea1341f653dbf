"""Named fp32 weights as safetensors files: written, read back, averaged. Nothing is unpickled."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_BYTES = 4 * 2**30  # of one file; bounds the host memory that a save needs


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path, prefix: str, writes: bool) -> str | None:
    """Write named tensors into folder/PREFIX-00000.safetensors and so on, each of at most SHARD_BYTES.

    Every rank iterates, because the tensors are gathered as they are asked for; one of them writes.

    Returns:
        What went wrong, or None. It is not raised: a rank that left early would keep the others waiting.
    """
    shard: dict[str, Tensor] = {}
    error: str | None = None
    index = size = 0

    def flush() -> str | None:
        try:
            save_file(shard, folder / f"{prefix}-{index:05d}.safetensors", metadata={"format": "pt"})
        except Exception as problem:  # safetensors has an exception class of its own; every kind is reported
            return str(problem)
        return None

    for name, weight in weights:
        if not writes or error:
            continue
        if shard and size + weight.nbytes > SHARD_BYTES:
            error = flush()
            shard, size, index = {}, 0, index + 1
        shard[name] = weight.contiguous()
        size += weight.nbytes
    return flush() if writes and not error else error


def read_weights(files: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of some files, by name."""
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def mean_weights(models: Sequence[Sequence[Path]]) -> dict[str, Tensor]:
    """The uniform mean of the weights of several models, each given as its files, all with the same tensors.

    Summed in fp64, divided, and rounded once to fp32. Beside the result, one tensor at a time is in memory.
    """
    with ExitStack() as stack:
        opened = [_open(files, stack) for files in models]
        mean = {}
        for name in opened[0]:
            total = opened[0][name].get_tensor(name).double()
            for tensors in opened[1:]:
                total += tensors[name].get_tensor(name)
            mean[name] = (total / len(opened)).float()
    return mean


def _open(files: Iterable[Path], stack: ExitStack) -> dict[str, Any]:
    """Name of each tensor -> the open file that has it."""
    tensors: dict[str, Any] = {}
    for path in files:
        file = stack.enter_context(safe_open(path, framework="pt"))
        tensors |= dict.fromkeys(file.keys(), file)
    return tensors
