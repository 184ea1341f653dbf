"""Gather windows of any sources into the tensors of a batch."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypedDict, cast

import numpy as np
import numpy.typing as npt
import torch

from plumbline.data.damage import DamagedFileError
from plumbline.data.indexed import Int64s
from plumbline.data.memory import Memory
from plumbline.data.streams import IGNORED, Rows, WindowStream

Int32s = npt.NDArray[np.int32]


class Batch(TypedDict):
    """Hold one micro-batch of b samples of T tokens."""

    input_ids: torch.Tensor
    """int64 [b, T]"""
    labels: torch.Tensor
    """int64 [b, T]: the token after each input, already shifted; -100 if there is none."""
    document_ids: torch.Tensor
    """int32 [b, T]: 0, 1, 2, ... within the sample, incremented at each document's first token."""
    positions: torch.Tensor
    """int32 [b, T]: distance from the first token of the same document in this sample."""
    sample_index: torch.Tensor
    """int64 [b]: number of the sample in the training order, or of the window in a validation split; -1 for padding
    rows."""


def check_ids(batch: Batch, vocab_size: int, source_of: Callable[[int], object]) -> Batch:
    """Return the batch unchanged if its token ids are all in [0, `vocab_size`).

    Args:
        batch: the gathered batch.
        vocab_size: number of ids that the model has embeddings for.
        source_of: returns the name of a row's source.

    Raises:
        DamagedFileError: an id is out of range; names the source and the id.
    """
    ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    wrong = (labels >= vocab_size) | ((labels < 0) & (labels != IGNORED))
    if ids.max() < vocab_size and ids.min() >= 0 and not wrong.any():
        return batch
    worst = np.where(wrong, labels, ids)
    row, place = np.argwhere((worst < 0) | (worst >= vocab_size))[0].tolist()
    raise DamagedFileError(
        f"{source_of(row)}: holds token id {worst[row, place]}, and the vocabulary of the model ends at "
        f"{vocab_size - 1}: it was made with another tokenizer, or is damaged; set model.vocab_size to that of its "
        "tokenizer, or prepare it again"
    )


def gather(
    streams: Sequence[WindowStream],
    source: Int64s,
    window: Int64s,
    sample_index: Int64s,
    length: int,
    memory: Memory | None = None,
) -> Batch:
    """Read windows into one batch.

    Args:
        streams: What to read.
        source: [b], the index of each row's stream, or -1 for a row of padding.
        window: [b], the number of the window in its stream.
        sample_index: [b], numbers to pass through to the batch.
        length: Tokens per row (T).
        memory: Memory to reuse for the batch; None allocates new memory.
    """
    rows = Rows(len(source), length, memory)
    for number in set(source.tolist()):
        where = np.flatnonzero(source == number)
        if number >= 0:
            streams[number].fill(rows, where, window[where])
        else:
            rows.inputs[where], rows.labels[where] = 0, IGNORED
    _write_documents(rows)
    return Batch(
        input_ids=torch.from_numpy(rows.inputs),
        labels=torch.from_numpy(rows.labels),
        document_ids=torch.from_numpy(rows.documents),
        positions=torch.from_numpy(rows.positions),
        sample_index=torch.from_numpy(np.array(sample_index, np.int64)),
    )


def pinned(batch: Batch, gpu: int) -> Batch:
    """Return the batch in pinned memory; needs a GPU.

    Args:
        batch: the batch to pin.
        gpu: index of this process's GPU; a thread that has not selected it may open a context on the first one.
    """
    torch.cuda.set_device(gpu)
    tensors = cast(dict[str, torch.Tensor], batch)
    return cast(Batch, {name: tensor.pin_memory() for name, tensor in tensors.items()})


def split(batch: Batch, rows: int) -> list[Batch]:
    """Split a batch into parts of `rows` rows each, in the same memory."""
    parts = [tensor.split(rows) for tensor in cast(dict[str, torch.Tensor], batch).values()]
    return [cast(Batch, dict(zip(batch, tensors, strict=True))) for tensors in zip(*parts, strict=True)]


def _write_documents(rows: Rows) -> None:
    """Write document ids and positions, computed from where documents begin in each row."""
    size = rows.inputs.size
    first = np.arange(0, size, rows.length)  # a row begins with document 0
    bounds = np.concatenate([first, *rows.begins, [size]])
    bounds.sort()
    last = bounds[1:] != bounds[:-1]  # of those at one position: an empty document begins where the next one does
    begins, lengths = bounds[:-1][last], (bounds[1:] - bounds[:-1])[last]
    ids = np.arange(len(begins)) - np.searchsorted(begins, first)[begins // rows.length]
    rows.documents.reshape(-1)[:] = np.repeat(ids.astype(np.int32), lengths)
    np.subtract(_places(size), np.repeat(begins.astype(np.int32), lengths), out=rows.positions.reshape(-1))


@lru_cache(maxsize=8)
def _places(size: int) -> Int32s:
    return np.arange(size, dtype=np.int32)
