"""Diagnostics of a training step: one more forward of its first micro-batch, and a look at its update.

Everything is measured as sums; those of all ranks are added before a statistic is formed, so a record does not depend
on how samples lie over ranks. Training is not touched: the numbers of a run are the same with and without, to the last
bit. docs/diagnostics.md has the keys.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from plumbline.launcher.runtime.engine.deepspeed import Engine
from plumbline.launcher.runtime.engine.updates import UpdateWatch
from plumbline.launcher.runtime.system.collectives import sum_over_ranks

QUERIES = 1024  # of a full sample, per rank: attention is measured for one in tokens / 1024
DIGITS = 6  # significant ones in a record


def watch_step(engine: Engine, batch: Mapping[str, Tensor], max_tokens: int) -> UpdateWatch:
    """Observe a forward of this rank's batch [B, T], cut to max_tokens, and go on with the update; all ranks must call.

    Hand the watch to `Engine.train_step`, then read `step_record`.
    """
    length = min(batch["input_ids"].size(1), max_tokens)
    rows = max(1, max_tokens // length)
    sample = {name: batch[name][:rows, :length] for name in ("input_ids", "document_ids", "positions")}
    stride = -(-max_tokens // QUERIES)  # by the cap, not by what this batch has: it must not depend on the world size
    return engine.watch(sample, stride)


def step_record(watch: UpdateWatch) -> dict[str, Any]:
    """Key -> value over all ranks, for metrics.jsonl; all ranks must call."""
    watch.observation.total(sum_over_ranks, _largest)
    return {key: float(f"{value:.{DIGITS}g}") for key, value in watch.observation.record().items()}


def _largest(values: Tensor) -> Tensor:
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
