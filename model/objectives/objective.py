"""Define an objective: a module that turns a model and a batch into sums of losses, in one forward pass.

Sums, not means: the training loop divides each term by its number of targets in the whole global batch, so that the
weight of a target depends neither on accumulation nor on ignored labels or the number of ranks.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel
from torch import Tensor, nn

from plumbline.model.attention import ATTENTIONS, attention_kind
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.lookahead.thoughts import Thinker
from plumbline.model.parameterization.multipliers import Multipliers

Batch = Mapping[str, Any]  # data.windows.Batch on a device: tensors by name


@dataclass(frozen=True)
class Work:
    """Count what a step computes per token of text."""

    blocks: float = 1.0
    """Tokens and slots that pass all blocks of the model."""
    head: float = 1.0
    """Predictions."""
    own_blocks: int = 0
    """Additional blocks of the objective."""


class Losses(NamedTuple):
    """Hold the result of a training forward pass; a tuple, since DeepSpeed does not find tensors in a dataclass."""

    terms: Tensor
    """Losses to differentiate, [terms]: each a weighted sum over its targets, in nats."""
    cross_entropy: Tensor
    """Summed cross-entropy of the next token in nats, a scalar to report."""
    reports: Tensor
    """Sums and counts of the reports, [reports, 2]."""


@dataclass(frozen=True)
class Decoding:
    """Describe how text is decoded with the thoughts of an objective."""

    thinker: Thinker
    """Makes the thoughts."""
    commits: bool
    """Whether text after a thought sees it."""


class ObjectiveSettings(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False):
    """Configure one objective, and state what other code must know about it before it is built.

    A subclass adds a `name` and its own keys.
    """

    is_plain: ClassVar[bool] = False
    """Whether it is the ordinary objective, of which there is one: reports do not mention it, and its memory is
    estimated from fewer blocks."""
    needs_slots: ClassVar[bool] = True
    """Whether it runs blocks on more than the text, which attention must support (`Attention.serves_slots`)."""
    reuses_blocks: ClassVar[bool] = True
    """Whether a step runs a block more than once, so that ZeRO-3 cannot gather and reduce it as one unit."""
    name: str
    """Which objective."""

    def make(self, model: ModelConfig, multipliers: Multipliers, seed: int) -> "Objective":
        """Build the objective of a run, with uninitialised parameters.

        Args:
            model: configuration of the model that it trains.
            multipliers: multipliers of that model.
            seed: seed of its random choices.
        """
        raise NotImplementedError

    def problems(self, model: ModelConfig, length: int, _text: str | None) -> Iterator[str]:
        """Yield reasons why it cannot train a model on this data: the key, its value and what would fit.

        Args:
            model: configuration of the model that it trains.
            length: tokens of a sequence.
            _text: key of the first source whose tokens all have labels, or None if every source is a task.
        """
        for key in ("horizon", "anchors"):
            found = getattr(self, key, None)
            if found is not None and found > length:
                yield (
                    f"objective.{key} = {found} is more than data.sequence_length = {length} has room for: set "
                    f"{length} or less"
                )
        if self.needs_slots and not attention_kind(model).serves_slots:
            served = " or ".join(name for name, kind in ATTENTIONS.items() if kind.serves_slots)
            yield (
                f"objective.name = {self.name} needs model.attention: {served}; it is {model.attention}, so train for "
                "next_token"
            )

    def cautions(self) -> Iterator[str]:
        """Yield warnings, a sentence each, about settings that are allowed but misleading."""
        yield from ()

    def work(self, _length: int) -> Work:
        """Return what a step computes per token, in sequences of `length` tokens."""
        return Work()

    @property
    def text_sees_thoughts(self) -> bool:
        """Return whether text after a thought is only predicted with it, so that the plain model is not trained."""
        return False

    @property
    def without_thoughts(self) -> str | None:
        """Return a warning of what the model predicts without thoughts, or None if the objective trains that."""
        if not self.text_sees_thoughts:
            return None
        return (
            f"It was trained to predict with thoughts before the text ({self}). What it says without them was not "
            "trained"
        )

    def __str__(self) -> str:
        """Return one line: latent_lookahead: horizon 4, anchors 64, ..."""
        settings = self.model_dump()
        name = settings.pop("name")
        set_keys = [f"{key} {value}" for key, value in settings.items() if value is not None and value is not False]
        return f"{name}: {', '.join(set_keys)}"


class Objective(nn.Module):
    """Hold what training needs besides the model, if anything; its parameters are named `objective.*`."""

    terms: tuple[str, ...]
    """Names of the means whose sum is minimised; the first is the cross-entropy of the next token."""
    reports: tuple[str, ...] = ()
    """Names of further means to log."""
    thinks: bool = False
    """Whether it can predict with thoughts, besides the plain model's prediction: `thinking_states`."""
    undecodable: str = "decoding with thoughts is for runs with objective.name: latent_lookahead; leave --think out"
    """Why text is not decoded with thoughts, if `decoding` is None."""

    @property
    def decoding(self) -> Decoding | None:
        """Return how text is decoded with its thoughts, here and by exported code, or None if it is not."""
        return None

    def on_step(self, model: CausalLM, step: int) -> None:
        """Update what changes in the model over training, before the first forward pass of a step.

        Args:
            model: the whole model.
            step: completed optimizer steps.
        """

    @abstractmethod
    def targets(self, batch: Batch) -> Tensor:
        """Return the number of targets of each term in this batch, [terms]; depends only on the batch."""

    @abstractmethod
    def forward(self, model: CausalLM, batch: Batch, step: int) -> Losses:
        """Return the losses of a batch, in training or evaluation mode.

        Args:
            model: the whole model; ZeRO-3 only gathers modules that are called.
            batch: one micro-batch.
            step: completed optimizer steps.
        """

    def thinking_states(self, model: CausalLM, batch: Batch) -> Tensor:
        """Return the states [B, T, D] from which each next token is predicted with thoughts, given the true tokens."""
        raise NotImplementedError(f"{type(self).__name__} does not think")


class TrainedLM(CausalLM):
    """Train a CausalLM with its objective as one module, since an engine needs one forward per backward."""

    def __init__(self, config: ModelConfig, multipliers: Multipliers, objective: Objective) -> None:
        super().__init__(config, multipliers)
        self.objective = objective

    def forward(self, *inputs: Any, through: Callable[..., Any] = CausalLM.predict, **named: Any) -> Any:
        """Return what `through`, a method of this class, makes of the other arguments.

        An engine calls every method in this way, because DeepSpeed gathers weights and prepares the backward pass only
        around a call of the module itself.
        """
        return through(self, *inputs, **named)

    def losses(self, batch: Batch, step: int) -> Losses:
        """Return the losses of a batch after `step` completed optimizer steps."""
        losses: Losses = self.objective(self, batch, step)
        asked = {"terms": (len(self.objective.terms),), "reports": (len(self.objective.reports), 2)}
        for name, shape in asked.items():
            if tuple(found := getattr(losses, name).shape) != shape:  # it would be broadcast
                raise TypeError(
                    f"{type(self.objective).__name__}: {name} of shape {list(found)}, expected {list(shape)}"
                )
        return losses

    def thinking_logits(self, batch: Batch) -> Tensor:
        """Return the fp32 logits [B, T, V] of a batch, predicted with thoughts."""
        return self.lm_head(self.objective.thinking_states(self, batch), None, 0.0)  # type: ignore[no-any-return]

    def thinking_cross_entropy(self, batch: Batch) -> Tensor:
        """Return the summed cross-entropy of the predictions with thoughts, in nats."""
        _, cross_entropy = self.lm_head(self.objective.thinking_states(self, batch), batch["labels"], 0.0)
        return cross_entropy  # type: ignore[no-any-return]
