"""What an objective is: a module that turns a model and a batch into sums of losses, in one forward pass.

Sums, not means: the training loop divides each term by its targets in the whole global batch, so that neither
accumulation nor ignored labels nor the number of ranks change what a target weighs.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from torch import Tensor, nn

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.multipliers import Multipliers

Batch = Mapping[str, Any]  # data.windows.Batch on a device: tensors by name


@dataclass(frozen=True)
class Work:
    """What a step computes, for each token of text."""

    blocks: float = 1.0
    """Tokens and slots that pass all blocks of the model."""
    head: float = 1.0
    """Predictions."""
    own_blocks: int = 0
    """Blocks of the objective's own."""


class ObjectiveSettings(
    BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
):
    """What the configurations of all objectives have in common."""

    def work(self, _length: int) -> Work:
        """For sequences of `length` tokens."""
        return Work()

    @property
    def text_sees_thoughts(self) -> bool:
        """Whether the text after a thought is only ever predicted with it, so that the plain model was not trained."""
        return False

    def __str__(self) -> str:
        """In one line: latent_lookahead: horizon 4, anchors 64, ..."""
        settings = self.model_dump()
        name = settings.pop("name")
        return f"{name}: {', '.join(f'{key} {value}' for key, value in settings.items() if value)}"


class Objective(nn.Module):
    """Holds what training needs beyond the model, if anything; its parameters are named `objective.*`."""

    terms: tuple[str, ...]
    """Names of the means whose sum is minimised; the first is the cross-entropy of the next token."""
    reports: tuple[str, ...] = ()
    """Further means to log."""
    thinks: bool = False
    """Whether there is another way to predict than that of the plain model: `thinking_states`."""

    def on_step(self, model: CausalLM, step: int) -> None:
        """Set what changes with training in the model, before the first forward pass of a step.

        Args:
            model: the whole one.
            step: completed optimizer steps.
        """

    @abstractmethod
    def targets(self, batch: Batch) -> Tensor:
        """[terms]: how many targets each term sums over in this batch, by the batch alone."""

    @abstractmethod
    def forward(self, model: CausalLM, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Run the model, in training or evaluation mode.

        Args:
            model: the whole one; what it calls itself, ZeRO-3 gathers.
            batch: one micro-batch.
            step: completed optimizer steps.

        Returns:
            Losses to differentiate, [terms], each a sum over its targets in nats times its weight; the summed
            cross-entropy of the next token, to report; and sums and counts of the reports, [reports, 2].
        """

    def thinking_states(self, model: CausalLM, batch: Batch) -> Tensor:
        """[B, T, D]: what the head predicts each next token from, given the true ones before, if the model thinks."""
        raise NotImplementedError(f"{type(self).__name__} does not think")


class TrainedLM(CausalLM):
    """A CausalLM with its objective: one module, since an engine wants one forward for each backward."""

    def __init__(self, config: ModelConfig, multipliers: Multipliers, objective: Objective) -> None:
        super().__init__(config, multipliers)
        self.objective = objective

    def forward(self, *inputs: Any, step: int | None = None, thinking: bool = False, **named: Any) -> Any:
        """With `step`, what the objective makes of the batch `inputs[0]`; else as a CausalLM.

        With `thinking`, logits of the batch `inputs[0]` by an objective that thinks; with `labels`, their two sums.
        """
        if thinking:
            return self.lm_head(self.objective.thinking_states(self, inputs[0]), named.get("labels"), 0.0)
        if step is None:
            return super().forward(*inputs, **named)
        return self.objective(self, inputs[0], step)
