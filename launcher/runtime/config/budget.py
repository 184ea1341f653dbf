"""Count a run's parameters and the bytes of a checkpoint before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass

from plumbline.launcher.runtime.config.schema import Config
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.skeleton import model_tensors
from plumbline.model.parameterization.tensors import OF_CONTEXT

MIB, GIB = 2**20, 2**30


def checkpoint_bytes(config: Config, rows: Sequence[ParameterRow]) -> float:
    """Return the bytes of one checkpoint: fp32 weights, the optimizer's state, and a moving average.

    They are the same at every ZeRO stage and in every precision.
    """
    count = totals(rows)
    average = 0.0 if config.train.ema_half_life_tokens is None else 4.0 * count.trained
    return 4.0 * count.total + 8.0 * count.trained + state_beyond_adamw(config) + average


def state_beyond_adamw(config: Config) -> float:
    """Return the bytes of optimizer state beyond AdamW's two fp32 moments, for the whole model; negative for Muon."""
    kind = config.optimizer.kind
    tensors = model_tensors(config.model, config.objective).values()
    trained = [tensor for tensor in tensors if tensor.rule.trains(config.model)]
    own = [tensor.shape for tensor in trained if kind.all_tensors or tensor.rule.role == "hidden_matrix"]
    return sum(kind.state_beyond_adamw(shape, config.optimizer) for shape in own)


@dataclass(frozen=True)
class ParameterCount:
    """Hold the parameter counts of a run."""

    total: int
    non_embedding: int
    """N of scaling laws: without the embedding, the unembedding, matrices of frozen mixing and the objective's own
    parameters."""
    trained: int
    """Those that the optimizer updates."""


def totals(rows: Sequence[ParameterRow]) -> ParameterCount:
    """Count the parameters of a table."""
    left_out = ("embedding", "unembedding", *OF_CONTEXT)
    counted = [row for row in rows if row.role not in left_out and not row.name.startswith("objective.")]
    return ParameterCount(
        total=sum(row.count for row in rows),
        non_embedding=sum(row.count for row in counted),
        trained=sum(row.count for row in rows if row.trainable),
    )
