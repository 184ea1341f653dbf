"""Encode documents on several cores, in order, holding only a few batches in memory at a time."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from plumbline.data.heldout import Document
from plumbline.data.indexed import Integers
from plumbline.data.tokenizers import Encoder

BATCH_BYTES = 1 << 20
"""Text per task: enough to hide the cost of moving it between processes, little enough to balance the load."""


@dataclass(frozen=True)
class Encoded:
    """Hold consecutive documents of one split."""

    held_out: bool
    tokens: Integers
    """[sum of lengths]: the documents end to end, each ended by end-of-text."""
    lengths: list[int]
    source_bytes: int


def encode_documents(documents: Iterable[Document], folder: Path, spec: str, workers: int) -> Iterator[Encoded]:
    """Encode documents with the tokenizer in `folder`; the result does not depend on the number of workers.

    Raises:
        OSError: a worker process died.
    """
    if workers == 1:
        encoder = Encoder(folder, spec)
        for batch in _batches(documents):
            yield from _encode(encoder, batch)
        return
    # Fresh processes: a fork would copy the tokenizer library's threads in an unknown state.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (folder, spec))
    pending: deque[Future[list[Encoded]]] = deque()
    try:
        for batch in _batches(documents):
            pending.append(pool.submit(_work, batch))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise OSError("a tokenizing process was killed, most likely for lack of memory; use fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.source_bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_encoder: Encoder  # one per worker process, loaded once


def _start_worker(folder: Path, spec: str) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encoder = Encoder(folder, spec)


def _work(batch: list[Document]) -> list[Encoded]:
    return list(_encode(_encoder, batch))


def _encode(encoder: Encoder, batch: list[Document]) -> Iterator[Encoded]:
    for held_out in (False, True):
        chosen = [document for document in batch if document.held_out == held_out]
        if chosen:
            pieces = [encoder.encode(document.text) for document in chosen]
            source_bytes = sum(document.source_bytes for document in chosen)
            yield Encoded(held_out, np.concatenate(pieces), [len(piece) for piece in pieces], source_bytes)
