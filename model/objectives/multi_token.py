"""Multi-token prediction (arXiv 2404.19737): independent heads on a shared trunk predict the tokens further ahead.

The trunk is all blocks but the last, which is the first head. Head k is a block of its own on the same stream and
predicts token i + k; the final norm and the unembedding are shared.
"""

from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from model.attention.context import attention_context
from model.blocks import make_block
from model.config import ModelConfig
from model.decoder import CausalLM
from model.lookahead.anchors import labels_ahead
from model.lookahead.masks import text_of
from model.multipliers import Multipliers
from model.objectives.objective import Batch, Objective, ObjectiveSettings, Work


class MultiTokenConfig(ObjectiveSettings):
    """Beside the next token, `horizon` - 1 further ones, each by a head of one block."""

    name: Literal["multi_token"] = "multi_token"
    """Which objective."""
    horizon: int = Field(default=4, ge=2)
    """How many tokens are predicted, the next one included."""
    weight: NonNegativeFloat = 1.0
    """Of each further token's mean loss; 1 is the paper's plain sum over heads."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of logsumexp(logits)^2, of all heads."""

    def work(self, _length: int) -> Work:
        """A block and a prediction for each further token."""
        return Work(head=self.horizon, own_blocks=self.horizon - 1)


class MultiToken(Objective):
    """Heads 2 to `horizon`."""

    terms = ("next_token", "further_tokens")

    def __init__(self, config: MultiTokenConfig, model: ModelConfig, multipliers: Multipliers) -> None:
        super().__init__()
        self.config = config
        self.reports = tuple(f"multi_token/loss_{number}" for number in range(2, config.horizon + 1))
        last = model.num_hidden_layers - 1
        self.heads = nn.ModuleList(make_block(model, multipliers, last) for _ in self.reports)

    def targets(self, batch: Batch) -> Tensor:
        """Valid labels, and those of the further heads."""
        ahead = labels_ahead(batch["labels"], batch["document_ids"], self.config.horizon)[:, :, 1:]
        return torch.stack(((batch["labels"] >= 0).sum(), (ahead >= 0).sum()))

    def forward(self, model: CausalLM, batch: Batch, _step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `Objective`."""
        decoder, text = model.model, text_of(model.config, batch)
        x = decoder.embed(batch["input_ids"], text.positions)
        context = attention_context(model.config, text.positions, 0, text.document_ids, x.dtype)
        if model.config.value_residual:
            context = decoder.with_first_values(context, x)
        *trunk, first = decoder.layers
        for layer in trunk:
            x = decoder.run(layer, x, context)
        ahead = labels_ahead(batch["labels"], batch["document_ids"], self.config.horizon)
        losses, nats = [], []
        for number, head in enumerate((first, *self.heads)):
            labels = batch["labels"] if number == 0 else ahead[:, :, number]
            states = decoder.finish(decoder.run(head, x, context))
            loss, cross_entropy = model.lm_head(states, labels, self.config.z_loss)
            losses.append(loss)
            nats.append(cross_entropy)
        # The mean over all further targets is that over heads: times their number, it is the sum
        further = self.config.weight * len(self.heads) * torch.stack(losses[1:]).sum()
        counts = (ahead[:, :, 1:] >= 0).sum((0, 1))
        return torch.stack((losses[0], further)), nats[0], torch.stack((torch.stack(nats[1:]), counts), dim=1)
