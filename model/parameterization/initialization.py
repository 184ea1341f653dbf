"""Draw the first values of a model, each tensor by itself."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.tensors import tensor_rule


def _no_gather(_: nn.Parameter) -> AbstractContextManager[object]:
    return nullcontext()


@torch.no_grad()
def initialize(
    model: nn.Module,
    rows: "Sequence[ParameterRow]",
    seed: int,
    gather: Callable[[nn.Parameter], AbstractContextManager[object]] = _no_gather,
    given: Collection[str] = (),
) -> None:
    """Draw every tensor from N(init_mean, init_std^2), or as its module says; freeze those that do not train.

    Each tensor has a generator of its own, keyed by (seed, name): its values depend neither on the order of
    construction, nor on other tensors, nor on the device.

    Args:
        model: the model whose parameters are filled.
        rows: its parameter table.
        seed: of the run.
        gather: makes a parameter whole for the time of writing to it, where an engine has sharded it.
        given: names of the tensors that somebody else writes afterwards: they are filled with their mean, for drawing
            takes long where the model is large.
    """
    parameters = dict(model.named_parameters())
    for row in rows:
        parameter = parameters[row.name]
        parameter.requires_grad_(row.trainable)
        with gather(parameter):
            if row.init_std == 0.0 or row.name in given:
                parameter.fill_(row.init_mean)
                continue
            digest = hashlib.sha256(f"{seed}/{row.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            draw = tensor_rule(model, row.name).draw
            if draw is None:
                values = torch.empty(row.shape).normal_(row.init_mean, row.init_std, generator=generator)
            else:
                values = draw(row.shape, row.init_std, generator)
            parameter.copy_(values.view_as(parameter))
