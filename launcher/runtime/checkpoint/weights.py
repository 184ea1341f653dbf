"""Write and read named fp32 tensors as safetensors files: nothing is pickled."""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor


class Sink(Protocol):
    """Accept bytes, one part after the other."""

    def write(self, data: Any, /) -> int:
        """Accept the bytes of an object with a buffer, and return their number."""


@dataclass(frozen=True)
class TensorFile:
    """Hold the contents of a safetensors file to be written."""

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


def read_weights(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return all tensors of some files, by name."""
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
