"""Draw the first values of a model, each tensor by itself."""

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.tensors import tensor_rule

DRAWN_AT_ONCE = 8
"""Tensors that a rank draws at most beside one another: so many of fp32 its host holds beside the model."""


def _no_gather(_: nn.Parameter) -> AbstractContextManager[object]:
    return nullcontext()


@torch.no_grad()
def initialize(
    model: nn.Module,
    rows: Sequence[ParameterRow],
    seed: int,
    gather: Callable[[nn.Parameter], AbstractContextManager[object]] = _no_gather,
    given: Collection[str] = (),
) -> None:
    """Draw every tensor from N(init_mean, init_std^2), or as its module says; freeze those that do not train.

    Each tensor has a generator of its own, keyed by (seed, name): its values depend neither on the order of
    construction, nor on other tensors, nor on the device, and as many are drawn at once as torch has threads.

    Args:
        model: the model whose parameters are filled.
        rows: its parameter table.
        seed: of the run.
        gather: makes a parameter whole for the time of writing to it, where an engine has sharded it.
        given: names of the tensors that somebody else writes afterwards: they are filled with their mean, for drawing
            takes long where the model is large.
    """
    parameters = dict(model.named_parameters())
    drawn = {row.name for row in rows if row.init_std != 0.0} - set(given)
    values = _draw_ahead(model, [row for row in rows if row.name in drawn], seed)
    for row in rows:
        parameter = parameters[row.name]
        parameter.requires_grad_(row.trainable)
        with gather(parameter):
            if row.name in drawn:
                parameter.copy_(next(values).view_as(parameter))
            else:
                parameter.fill_(row.init_mean)


def _draw_ahead(model: nn.Module, rows: Sequence[ParameterRow], seed: int) -> Iterator[Tensor]:
    """Yield the first values of tensors in the order of their rows, while threads draw those that follow.

    A generator fills a tensor on one thread, however large it is, so that one core would draw a whole model.
    """
    threads = min(torch.get_num_threads(), DRAWN_AT_ONCE)
    pending: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for row in rows:
            pending.append(pool.submit(_draw, model, row, seed))
            if len(pending) == threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _draw(model: nn.Module, row: ParameterRow, seed: int) -> Tensor:
    """Return the first values of one tensor, fp32 on the CPU."""
    digest = hashlib.sha256(f"{seed}/{row.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    draw = tensor_rule(model, row.name).draw
    if draw is None:
        return torch.empty(row.shape).normal_(row.init_mean, row.init_std, generator=generator)
    return draw(row.shape, row.init_std, generator)
