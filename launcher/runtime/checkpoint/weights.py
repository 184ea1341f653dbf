"""Split named fp32 weights over ranks, write them as safetensors files, read and average them, without unpickling."""

import json
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

SHARD_BYTES = 2**30  # of one file, unless a single tensor is larger


class Sink(Protocol):
    """Take bytes, one part after the other."""

    def write(self, data: Any, /) -> int:
        """Take the bytes of an object that has a buffer; return how many."""


@dataclass(frozen=True)
class TensorFile:
    """Hold what a safetensors file is to hold."""

    tensors: dict[str, Tensor]
    """fp32, on the CPU."""
    metadata: dict[str, str]

    def write(self, sink: Sink) -> None:
        """Write the file, one tensor at a time, as the safetensors library would."""
        tensors = sorted(self.tensors.items())
        header: dict[str, Any] = {"__metadata__": self.metadata}
        end = 0
        for name, tensor in tensors:
            assert tensor.dtype == torch.float32, f"{name} is {tensor.dtype}"
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        sink.write(struct.pack("<Q", len(text)))
        sink.write(text)
        for _, tensor in tensors:
            sink.write(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def weight_files(weights: Iterable[tuple[str, Tensor]], prefix: str, rank: int, ranks: int) -> dict[str, TensorFile]:
    """Return this rank's share of the files PREFIX-00000.safetensors and so on, each of at most SHARD_BYTES.

    Every rank iterates over all weights, because they are gathered as they are asked for, and keeps every so manieth
    file: host memory and the work of writing are shared.
    """
    files: dict[str, TensorFile] = {}
    number = size = 0
    for name, weight in weights:
        if size and size + weight.nbytes > SHARD_BYTES:
            number, size = number + 1, 0
        size += weight.nbytes
        if number % ranks == rank:
            file = files.setdefault(f"{prefix}-{number:05d}.safetensors", TensorFile({}, {"format": "pt"}))
            file.tensors[name] = weight.clone()  # it may be the very memory that training updates
    return files


def read_weights(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return all tensors of some files, by name."""
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def mean_weights(models: Sequence[Sequence[Path]]) -> dict[str, Tensor]:
    """Return the uniform mean of the weights of several models, each given as its files, with the same tensors.

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
    """Return the open file that has each tensor, by name."""
    tensors: dict[str, Any] = {}
    for path in files:
        file = stack.enter_context(safe_open(path, framework="pt"))
        tensors |= dict.fromkeys(file.keys(), file)
    return tensors
