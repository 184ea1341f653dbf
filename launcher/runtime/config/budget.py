"""Count what a run has before it starts: its parameters, and the bytes of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

from plumbline.launcher.runtime.config.schema import Config
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.table import parameter_shapes
from plumbline.model.parameterization.tensors import Role

MIB, GIB = 2**20, 2**30


def checkpoint_bytes(config: Config, rows: Sequence[ParameterRow]) -> float:
    """Return the bytes of one checkpoint: fp32 weights, the optimizer's state, and a moving average.

    The same at every ZeRO stage and in every precision.
    """
    total, trained = totals(rows).total, trained_count(rows)
    average = 0.0 if config.train.ema_half_life_tokens is None else 4.0 * trained
    return 4.0 * total + 8.0 * trained + state_beyond_adamw(config) + average


def state_beyond_adamw(config: Config) -> float:
    """Return the bytes of optimizer state over AdamW's two fp32 moments, of the whole model; negative for Muon."""
    kind = config.optimizer.kind
    roles: tuple[Role, ...] | None = None if kind.all_tensors else ("hidden_matrix",)
    shapes = parameter_shapes(config.model, config.objective, roles).values()
    return sum(kind.state_beyond_adamw(shape, config.optimizer) for shape in shapes)


@dataclass(frozen=True)
class ParameterCount:
    """Count the parameters of a run."""

    total: int
    non_embedding: int
    """Number of those that scaling laws call N: no embedding, unembedding or objective's own."""


def totals(rows: Sequence[ParameterRow]) -> ParameterCount:
    """Count the parameters of a table."""
    counted = [
        row for row in rows if row.role not in ("embedding", "unembedding") and not row.name.startswith("objective.")
    ]
    return ParameterCount(total=sum(row.count for row in rows), non_embedding=sum(row.count for row in counted))


def trained_count(rows: Sequence[ParameterRow]) -> int:
    """Count the parameters of a table that the optimizer moves."""
    return sum(row.count for row in rows if row.trainable)
