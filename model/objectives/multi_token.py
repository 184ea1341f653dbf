"""Predict further tokens with independent heads on a shared trunk: multi-token prediction (arXiv 2404.19737).

The trunk is all blocks but the last, which is the first head. Head k is a separate block on the same stream and
predicts token i + k; the final norm and the unembedding are shared. The number of heads does not grow with depth, so
their residual branches are not scaled with depth (`Multipliers.outside_the_stack`).
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from plumbline.model.attention.context import AttentionContext
from plumbline.model.blocks import block_kind
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import Decoder
from plumbline.model.objectives.further_tokens import FurtherTokens, FurtherTokensConfig
from plumbline.model.parameterization.multipliers import Multipliers


class MultiTokenConfig(FurtherTokensConfig):
    """Predict, besides the next token, `horizon` - 1 further ones, each with a head of one block."""

    name: Literal["multi_token"] = "multi_token"
    """Which objective."""
    horizon: int = Field(default=4, ge=2)
    """Number of tokens to predict, including the next one."""
    weight: NonNegativeFloat = 1.0
    """Weight of each further token's mean loss; 1 is the paper's plain sum over heads where no document ends
    within reach of a head. The mean is over all further targets together, so where heads lack some at the ends of
    documents, each one left weighs more (1.33 times in documents of 8 tokens with horizon 4)."""

    def make(self, model: ModelConfig, multipliers: Multipliers, _seed: int) -> "MultiToken":
        """Return the objective."""
        return MultiToken(self, model, multipliers)

    @property
    def mean_weight(self) -> float:
        """Return the weight of the mean over all further targets; its factor `horizon` - 1 gives a sum over heads.

        With document ends heads have unequally many targets, and it is a multiple of the mean over all of them.
        """
        return self.weight * (self.horizon - 1)


class MultiToken(FurtherTokens):
    """Hold heads 2 to `horizon`."""

    def __init__(self, config: MultiTokenConfig, model: ModelConfig, multipliers: Multipliers) -> None:
        super().__init__(config)
        last = model.num_hidden_layers - 1
        own = multipliers.outside_the_stack(model)
        self.heads = nn.ModuleList(block_kind(model)(model, own, last) for _ in self.reports)

    def streams(
        self, decoder: Decoder, x: Tensor, context: AttentionContext, _input_ids: Tensor, _positions: Tensor
    ) -> Iterator[Tensor]:
        """See `FurtherTokens`."""
        *trunk, first = decoder.layers
        for layer in trunk:
            x = decoder.run(layer, x, context)
        for head in (first, *self.heads):
            yield decoder.run(head, x, context)
