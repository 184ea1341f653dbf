"""The ordinary objective: predict the next token."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeFloat
from torch import Tensor


class NextTokenConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Cross-entropy of the next token, optionally with a z-loss."""

    name: Literal["next_token"] = "next_token"
    """Which objective."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of logsumexp(logits)^2, which keeps the logits from drifting (PaLM used 1e-4)."""


def next_token(model: Callable[..., Any], batch: Mapping[str, Any], config: NextTokenConfig) -> tuple[Tensor, Tensor]:
    """Summed loss to differentiate and summed cross-entropy to report, over the valid labels of one micro-batch, nats.

    `model` is a CausalLM or an engine around one. Sums, not means: the training loop divides by the valid tokens of the
    whole global batch, so that neither accumulation nor ignored labels change what a token weighs.
    """
    loss, cross_entropy = model(
        batch["input_ids"],
        labels=batch["labels"],
        document_ids=batch["document_ids"],
        positions=batch["positions"],
        z_loss=config.z_loss,
    )
    return loss, cross_entropy
