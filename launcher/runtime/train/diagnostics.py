"""Diagnose a training step: one more forward pass of its first micro-batch, and a look at its update.

Everything is measured as sums, which are added over ranks before a statistic is computed. Each rank measures its own
samples, so with another number of ranks a record covers other samples. Training is not affected: a run has the same
numbers with and without diagnostics, to the last bit. docs/diagnostics.md lists the keys.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plumbline.data.streams import IGNORED
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.pieces import sampled, stands_for
from plumbline.launcher.runtime.ranks.collectives import sum_over_ranks
from plumbline.model.diagnostics.observer import Observation, layer_name, observing
from plumbline.model.diagnostics.statistics import gain_sums, gradient_sums, update_sums

QUERIES = 1024  # per rank of a full sample: attention is measured for one query in tokens / 1024
DIGITS = 6  # significant digits in a record


class StepObserver:
    """Observe one training step: a forward pass before it, its gradients, and the effect of its update on the weights.

    Each rank measures its own pieces of the weights; only the gradients of queries, keys and values are gathered,
    matrix by matrix. During the update, copies of parts of this rank's pieces of the matrices are held
    (`pieces.sampled`).

    Args:
        engine: the engine to observe.
        batch: this rank's first micro-batch [B, T] of the step; its forward pass is observed here. Collective.
        max_tokens: most tokens of the batch to measure.
    """

    def __init__(self, engine: Engine, batch: Mapping[str, Tensor], max_tokens: int) -> None:
        length = min(batch["input_ids"].size(1), max_tokens)
        rows = max(1, max_tokens // length)
        sample = {name: batch[name][:rows, :length] for name in ("input_ids", "document_ids", "positions")}
        stride = -(-max_tokens // QUERIES)  # from the cap, not the batch, so as not to depend on world size
        real = real_tokens(batch)
        if real is not None:
            real = real[:rows, :length].to(engine.world.device)
        self.observation: Observation
        with observing(engine.model, stride, real) as self.observation:
            engine.logits(sample)
        self._engine = engine
        self._before: dict[str, Tensor] = {}
        self._learned = {row.name: row for row in engine.plan.rows if row.trainable}
        self._layers = len(engine.model.model.layers)

    @torch.no_grad()
    def before_update(self) -> None:
        """Measure the gradients of queries, keys and values, and copy the matrices. Collective."""
        for number in range(self._layers):
            names = [f"model.layers.{number}.self_attn.{letter}_proj.weight" for letter in "qkv"]
            if all(name in self._learned for name in names):
                query, key, value = (self._engine.gradient(name) for name in names)
                place = layer_name(number, self._layers)
                self.observation.add("grad", f"/{place}", gradient_sums(query, key, value))
        for name, piece in self._engine.master_pieces():
            shape = self._learned[name].shape
            if len(shape) > 1:
                self._before[name] = sampled(piece, shape[-1]).clone()

    @torch.no_grad()
    def after_update(self) -> None:
        """Measure how far each matrix has moved, and the gains of norms."""
        for name, piece in self._engine.master_pieces():
            if name in self._before:
                before = self._before.pop(name)
                sums = update_sums(before, sampled(piece, self._learned[name].shape[-1]))
                self._add("update", name, {key: value * stands_for(before, piece) for key, value in sums.items()})
            elif not name.endswith("bias"):
                self._add("gain", name, gain_sums(piece))

    def record(self) -> dict[str, Any]:
        """Return key -> value over all ranks, for metrics.jsonl. Collective."""
        self.observation.total(sum_over_ranks, _largest)
        return {key: float(f"{value:.{DIGITS}g}") for key, value in self.observation.record().items()}

    def _add(self, kind: str, name: str, sums: Mapping[str, Tensor]) -> None:
        device = self._engine.world.device  # the masters may be offloaded
        self.observation.add(kind, self._place(name), {key: value.to(device) for key, value in sums.items()})

    def _place(self, name: str) -> str:
        """Return self_attn.q_proj/03 for model.layers.3.self_attn.q_proj.weight, lm_head/ for lm_head.weight."""
        name = name.removesuffix(".weight")
        inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if inside is None:
            return f"{name.removeprefix('model.')}/"
        return f"{inside[2]}/{layer_name(int(inside[1]), self._layers)}"


def real_tokens(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return which tokens of a batch are no padding, [B, T], or None if none is: a last document without labels is."""
    documents = batch["document_ids"]
    last = documents == documents[:, -1:]
    labelled = (last & (batch["labels"] != IGNORED)).any(1, keepdim=True)
    return None if labelled.all() else ~last | labelled


def _largest(values: Tensor) -> Tensor:
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
