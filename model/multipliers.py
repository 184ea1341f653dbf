"""The four constants through which a parameterization touches the forward pass."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Multipliers:
    """Forward multipliers of one model; `parameterization.multipliers` computes them, the decoder applies them."""

    attention: float
    """Scale of the attention logits."""
    embedding: float = 1.0
    """Multiplies the embedding's output."""
    residual: float = 1.0
    """Multiplies every branch before it is added to the residual stream."""
    output: float = 1.0
    """Multiplies the logits (before any soft cap)."""
