"""Sequential multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a chain of one-block modules.

    h_i^k = block_k(join_k [norm(h_i^(k-1)); norm(embedding of token i + k)]) predicts token i + k + 1

h^0 is the state that leaves the decoder's last block. Every module is fed the true token: the chain is causal, unlike a
thought. The final norm is the decoder's. The parameterization takes join and its norms for a part of the block: under
CompleteP their Adam eps is smaller by m_L than outside of one, and with depth_alpha below 1 their lr too.
"""

from typing import Literal, cast

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
from model.norms import make_norm
from model.objectives.objective import Batch, Objective, ObjectiveSettings, Work


class SequentialMTPConfig(ObjectiveSettings):
    """Beside the next token, `horizon` - 1 further ones, one module after the other."""

    name: Literal["sequential_mtp"] = "sequential_mtp"
    """Which objective."""
    horizon: int = Field(default=2, ge=2)
    """How many tokens are predicted, the next one included."""
    weight: NonNegativeFloat = 0.3
    """Of the mean loss of the further tokens."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of logsumexp(logits)^2, of all modules."""

    def work(self, _length: int) -> Work:
        """A block and a prediction for each further token."""
        return Work(head=self.horizon, own_blocks=self.horizon - 1)


class Link(nn.Module):
    """One link of the chain."""

    def __init__(self, model: ModelConfig, multipliers: Multipliers) -> None:
        super().__init__()
        self.state_layernorm, self.token_layernorm = make_norm(model), make_norm(model)
        self.state_proj = nn.Linear(model.hidden_size, model.hidden_size, bias=False)  # the two halves of `join`
        self.token_proj = nn.Linear(model.hidden_size, model.hidden_size, bias=False)
        self.block = make_block(model, multipliers, model.num_hidden_layers - 1)

    def join(self, state: Tensor, token: Tensor) -> Tensor:
        """What enters the block, [B, T, D]."""
        joined: Tensor = self.state_proj(self.state_layernorm(state)) + self.token_proj(self.token_layernorm(token))
        return joined


class SequentialMTP(Objective):
    """Modules 1 to `horizon` - 1."""

    terms = ("next_token", "further_tokens")

    def __init__(self, config: SequentialMTPConfig, model: ModelConfig, multipliers: Multipliers) -> None:
        super().__init__()
        self.config = config
        self.reports = tuple(f"sequential_mtp/loss_{number}" for number in range(2, config.horizon + 1))
        self.links = nn.ModuleList(Link(model, multipliers) for _ in self.reports)

    def targets(self, batch: Batch) -> Tensor:
        """Valid labels, and those of the further tokens."""
        ahead = labels_ahead(batch["labels"], batch["document_ids"], self.config.horizon)[:, :, 1:]
        return torch.stack(((batch["labels"] >= 0).sum(), (ahead >= 0).sum()))

    def forward(self, model: CausalLM, batch: Batch, _step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `Objective`."""
        decoder, text, tokens = model.model, text_of(model.config, batch), batch["input_ids"]
        x = decoder.embed(tokens, text.positions)
        context = attention_context(model.config, text.positions, 0, text.document_ids, x.dtype)
        if model.config.value_residual:
            context = decoder.with_first_values(context, x)
        for layer in decoder.layers:
            x = decoder.run(layer, x, context)
        loss, cross_entropy = model.lm_head(decoder.finish(x), batch["labels"], self.config.z_loss)
        ahead = labels_ahead(batch["labels"], batch["document_ids"], self.config.horizon)
        losses, nats = [], []
        for number, module in enumerate(self.links, start=1):
            link = cast(Link, module)
            true = decoder.embed(tokens.roll(-number, 1), text.positions)  # what rolls around has no label
            x = decoder.run(link.block, link.join(x, true), context)
            each, each_nats = model.lm_head(decoder.finish(x), ahead[:, :, number], self.config.z_loss)
            losses.append(each)
            nats.append(each_nats)
        counts = (ahead[:, :, 1:] >= 0).sum((0, 1))
        further = self.config.weight * torch.stack(losses).sum()
        return torch.stack((loss, further)), cross_entropy, torch.stack((torch.stack(nats), counts), dim=1)
