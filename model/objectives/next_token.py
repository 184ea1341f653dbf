"""Predict the next token: the ordinary objective."""

import math
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from plumbline.model.attention import attention_kind
from plumbline.model.attention.pruned import PrunedAttention, set_alpha
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.objectives.objective import Batch, Losses, Objective, ObjectiveSettings
from plumbline.model.parameterization.multipliers import Multipliers

LAST_ALPHA = 8.0


class NextTokenConfig(ObjectiveSettings):
    """Minimise the cross-entropy of the next token, optionally with a z-loss."""

    name: Literal["next_token"] = "next_token"
    """Which objective."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of logsumexp(logits)^2, which keeps the logits from drifting (PaLM used 1e-4)."""
    pruning_weight: NonNegativeFloat = 0.0
    """model.attention pruned: price of the context that layers keep, in nats for keeping all of it. (The paper averages
    over all T x T pairs, half of which cannot be dropped, so its 0.3 is 0.15 here.)"""
    pruning_steps: PositiveInt = 25_000
    """model.attention pruned: steps over which the votes sharpen, with alpha going from 1 to 8 along a cosine."""

    is_plain: ClassVar[bool] = True
    needs_slots: ClassVar[bool] = False
    reuses_blocks: ClassVar[bool] = False

    def make(self, _model: ModelConfig, _multipliers: Multipliers, _seed: int) -> "NextToken":
        """Return the objective."""
        return NextToken(self)

    def problems(self, model: ModelConfig, length: int, text: str | None) -> Iterator[str]:
        """Yield a problem, too, if a key is given of dropping context but no layer drops any; see the base class."""
        yield from super().problems(model, length, text)
        if issubclass(attention_kind(model), PrunedAttention):
            return
        for key in ("pruning_weight", "pruning_steps"):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                yield (
                    f"objective.{key} = {value} belongs to model.attention: pruned, and it is {model.attention}; "
                    "remove it"
                )

    def pruning_alpha(self, step: int) -> float:
        """Return the sharpness alpha of the votes after `step` steps (arXiv 2305.15805, section 3.2)."""
        progress = min(1.0, step / self.pruning_steps)
        return 1 + (LAST_ALPHA - 1) * (1 - math.cos(math.pi * progress)) / 2


class NextToken(Objective):
    """Train with the loss of CausalLM."""

    terms = ("next_token",)

    def __init__(self, config: NextTokenConfig) -> None:
        super().__init__()
        self.config = config

    def on_step(self, model: CausalLM, step: int) -> None:
        """Sharpen the votes of layers that prune their context."""
        if issubclass(attention_kind(model.config), PrunedAttention):  # others are not searched for them in every step
            set_alpha(model, self.config.pruning_alpha(step))

    def targets(self, batch: Batch) -> Tensor:
        """Count valid labels."""
        labels: Tensor = batch["labels"]
        return (labels >= 0).sum()[None]

    def forward(self, model: CausalLM, batch: Batch, _step: int) -> Losses:
        """Return cross-entropy + z-loss + the price of kept context; see `Objective`."""
        loss, cross_entropy = model.predict(
            batch["input_ids"],
            labels=batch["labels"],
            document_ids=batch["document_ids"],
            positions=batch["positions"],
            z_loss=self.config.z_loss,
            pruning_weight=self.config.pruning_weight,
        )
        return Losses(loss[None], cross_entropy, loss.new_empty(0, 2))
