"""Count a run's parameters and the bytes of a checkpoint before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass

from plumbline.launcher.runtime.config.schema import Config
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.skeleton import parameter_shapes
from plumbline.model.parameterization.tensors import Role

MIB, GIB = 2**20, 2**30


def checkpoint_bytes(config: Config, rows: Sequence[ParameterRow]) -> float:
    """Return the bytes of one checkpoint: fp32 weights, the optimizer's state, and a moving average.

    They are the same at every ZeRO stage and in every precision.
    """
    total, trained = totals(rows).total, trained_count(rows)
    average = 0.0 if config.train.ema_half_life_tokens is None else 4.0 * trained
    return 4.0 * total + 8.0 * trained + state_beyond_adamw(config) + average


def state_beyond_adamw(config: Config) -> float:
    """Return the bytes of optimizer state beyond AdamW's two fp32 moments, for the whole model; negative for Muon."""
    kind = config.optimizer.kind
    roles: tuple[Role, ...] | None = None if kind.all_tensors else ("hidden_matrix",)
    shapes = parameter_shapes(config.model, config.objective, roles).values()
    return sum(kind.state_beyond_adamw(shape, config.optimizer) for shape in shapes)


@dataclass(frozen=True)
class ParameterCount:
    """Hold the parameter counts of a run."""

    total: int
    non_embedding: int
    """N of scaling laws: without the embedding, the unembedding and the objective's own parameters."""


def totals(rows: Sequence[ParameterRow]) -> ParameterCount:
    """Count the parameters of a table."""
    counted = [
        row for row in rows if row.role not in ("embedding", "unembedding") and not row.name.startswith("objective.")
    ]
    return ParameterCount(total=sum(row.count for row in rows), non_embedding=sum(row.count for row in counted))


def trained_count(rows: Sequence[ParameterRow]) -> int:
    """Count the trained parameters of a table."""
    return sum(row.count for row in rows if row.trainable)
