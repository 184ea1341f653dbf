"""Share code between objectives that predict tokens beyond the next one with additional blocks."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from plumbline.model.attention.context import AttentionContext
from plumbline.model.decoder import CausalLM, Decoder
from plumbline.model.lookahead.anchors import labels_ahead
from plumbline.model.lookahead.masks import text_of
from plumbline.model.objectives.objective import Batch, Losses, Objective, ObjectiveSettings, Work


class FurtherTokensConfig(ObjectiveSettings):
    """Predict, besides the next token, `horizon` - 1 further ones, each with its own block."""

    reuses_blocks: ClassVar[bool] = False
    horizon: int = Field(ge=2)
    """Number of tokens to predict, including the next one."""
    weight: NonNegativeFloat
    """Weight of the further tokens' losses."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of logsumexp(logits)^2, for all predictions."""

    def work(self, _length: int) -> Work:
        """Count a block and a prediction for each further token."""
        return Work(head=self.horizon, own_blocks=self.horizon - 1)

    @property
    def mean_weight(self) -> float:
        """Return the weight of the mean loss over all further targets."""
        return self.weight


class FurtherTokens(Objective):
    """Predict from several output streams, each for the tokens at one distance."""

    terms = ("next_token", "further_tokens")

    def __init__(self, config: FurtherTokensConfig) -> None:
        super().__init__()
        self.config = config
        self.reports = tuple(f"{config.name}/loss_{number}" for number in range(2, config.horizon + 1))

    @abstractmethod
    def streams(
        self, decoder: Decoder, x: Tensor, context: AttentionContext, input_ids: Tensor, positions: Tensor
    ) -> Iterator[Tensor]:
        """Yield `horizon` streams [B, T, D], before the final norm, that predict the next token, the one after it, ...

        Args:
            decoder: decoder whose blocks read the text.
            x: input of the first block, [B, T, D].
            context: context that all blocks share.
            input_ids: the tokens [B, T].
            positions: their positions.
        """

    def targets(self, batch: Batch) -> Tensor:
        """Count valid labels, and those of the further tokens."""
        valid = self._labels(batch) >= 0
        return torch.stack((valid[:, :, 0].sum(), valid[:, :, 1:].sum()))

    def forward(self, model: CausalLM, batch: Batch, _step: int) -> Losses:
        """See `Objective`."""
        decoder, text, tokens = model.model, text_of(model.config, batch), batch["input_ids"]
        x = decoder.embed(tokens, text.positions)
        context = decoder.context(x, text.positions, text.document_ids)
        labels = self._labels(batch)
        losses, nats = [], []
        for number, stream in enumerate(self.streams(decoder, x, context, tokens, text.positions)):
            loss, cross_entropy = model.lm_head(decoder.finish(stream), labels[:, :, number], self.config.z_loss)
            losses.append(loss)
            nats.append(cross_entropy)
        further = self.config.mean_weight * torch.stack(losses[1:]).sum()
        counts = (labels[:, :, 1:] >= 0).sum((0, 1))
        reports = torch.stack((torch.stack(nats[1:]), counts), dim=1)
        return Losses(torch.stack((losses[0], further)), nats[0], reports)

    def _labels(self, batch: Batch) -> Tensor:
        """Return the next token, the one after it, ..., [B, T, horizon]."""
        return labels_ahead(batch["labels"], batch["document_ids"], self.config.horizon)
