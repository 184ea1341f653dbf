"""Draw the initial values of a model, each tensor independently."""

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
"""Most tensors that a rank draws at once, which the host's memory must hold in fp32 besides the model."""


Gather = Callable[[nn.Parameter], AbstractContextManager[object]]
"""Makes a parameter whole while it is written, if an engine has sharded it."""


def whole(_parameter: nn.Parameter) -> AbstractContextManager[object]:
    """Gather nothing: the parameter is not sharded."""
    return nullcontext()


@torch.no_grad()
def initialize(
    model: nn.Module,
    rows: Sequence[ParameterRow],
    seed: int,
    gather: Gather = whole,
    given: Collection[str] = (),
) -> None:
    """Draw every tensor from N(init_mean, init_std^2), or with its module's own rule; freeze those that do not train.

    Each tensor has its own generator, keyed by (seed, name), so its values do not depend on the order of construction,
    on other tensors, or on the device. As many tensors are drawn in parallel as torch has threads.

    Args:
        model: the model whose parameters are filled.
        rows: its parameter table.
        seed: seed of the run.
        gather: makes a parameter that an engine has sharded whole while it is written.
        given: names of tensors that are overwritten afterwards; they are filled with their mean, since drawing is slow
            for large models.
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
    """Yield the initial values of tensors in the order of the rows, while threads draw the next ones.

    A generator fills a tensor on a single thread however large it is, so without threads one core would draw the whole
    model.
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
    """Return the initial values of one tensor, in fp32 on the CPU."""
    digest = hashlib.sha256(f"{seed}/{row.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    draw = tensor_rule(model, row.name).draw
    if draw is None:
        return torch.empty(row.shape).normal_(row.init_mean, row.init_std, generator=generator)
    return draw(row.shape, row.init_std, generator)
