"""Predict further tokens by a chain of one-block modules (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    h_i^k = block_k(join_k [norm(h_i^(k-1)); norm(embedding of token i + k)]) predicts token i + k + 1

h^0 is the output of the decoder's last block. Every module gets the true token, so the chain is causal, unlike a
thought. The final norm is the decoder's. The number of modules does not grow with depth, so their branches are not
scaled with depth (`Multipliers.outside_the_stack`).
"""

from collections.abc import Iterator
from typing import Literal, cast

from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from plumbline.model.attention.context import AttentionContext
from plumbline.model.blocks import block_kind
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import Decoder
from plumbline.model.norms import make_norm
from plumbline.model.objectives.further_tokens import FurtherTokens, FurtherTokensConfig
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import matrix_rules, norm_rules


class SequentialMTPConfig(FurtherTokensConfig):
    """Predict, besides the next token, `horizon` - 1 further ones, with one module after the other."""

    name: Literal["sequential_mtp"] = "sequential_mtp"
    """Which objective."""
    horizon: int = Field(default=2, ge=2)
    """Number of tokens to predict, including the next one."""
    weight: NonNegativeFloat = 0.3
    """Weight of the mean loss of the further tokens."""

    def make(self, model: ModelConfig, multipliers: Multipliers, _seed: int) -> "SequentialMTP":
        """Return the objective."""
        return SequentialMTP(self, model, multipliers)


class Link(nn.Module):
    """Join the state with the true token's embedding, and run a block on it."""

    tensors = (*norm_rules("(state|token)_layernorm"), *matrix_rules("(state|token)_proj"))

    def __init__(self, model: ModelConfig, multipliers: Multipliers) -> None:
        super().__init__()
        self.state_layernorm, self.token_layernorm = make_norm(model), make_norm(model)
        self.state_proj = nn.Linear(model.hidden_size, model.hidden_size, bias=False)  # the two halves of `join`
        self.token_proj = nn.Linear(model.hidden_size, model.hidden_size, bias=False)
        own = multipliers.outside_the_stack(model)
        self.block = block_kind(model)(model, own, model.num_hidden_layers - 1)

    def join(self, state: Tensor, token: Tensor) -> Tensor:
        """Return the input of the block, [B, T, D]."""
        joined: Tensor = self.state_proj(self.state_layernorm(state)) + self.token_proj(self.token_layernorm(token))
        return joined


class SequentialMTP(FurtherTokens):
    """Hold modules 1 to `horizon` - 1."""

    def __init__(self, config: SequentialMTPConfig, model: ModelConfig, multipliers: Multipliers) -> None:
        super().__init__(config)
        self.links = nn.ModuleList(Link(model, multipliers) for _ in self.reports)

    def streams(
        self, decoder: Decoder, x: Tensor, context: AttentionContext, input_ids: Tensor, positions: Tensor
    ) -> Iterator[Tensor]:
        """See `FurtherTokens`."""
        for layer in decoder.layers:
            x = decoder.run(layer, x, context)
        yield x
        for number, module in enumerate(self.links, start=1):
            link = cast(Link, module)
            true = decoder.embed(input_ids.roll(-number, 1), positions)  # tokens that wrap around have no label
            x = decoder.run(link.block, link.join(x, true), context)
            yield x
