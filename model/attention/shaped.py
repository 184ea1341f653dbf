"""Shaped attention: identity + softmax - uniform, so that a layer starts close to passing the stream on.

    A = a I + b softmax(QK) - g C,   C_ij = 1/i for j <= i (what the softmax is when the logits are 0)

Shaped Transformer (arXiv 2306.17759): a = b = g = 1, logits divided by tau_0 sqrt(width) on top. SAS (arXiv 2311.01906,
section 4): a, b, g learned for each head and queries that start at zero, so that A starts as the identity.

Only the softmax part is a map over pairs: the identity is the values themselves and the uniform part their running
mean, so the fused kernel serves here as well and nothing of size [T, T] exists.
"""

import torch
from torch import Tensor, nn

from plumbline.model.attention.context import AttentionContext
from plumbline.model.attention.softmax import SoftmaxAttention
from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.multipliers import Multipliers


class ShapedAttention(SoftmaxAttention):
    """[B, T, hidden_size] -> [B, T, hidden_size]."""

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        super().__init__(config, multipliers, layer)
        learned = config.shaped_gains == "learned"
        self.shape_gains = nn.Parameter(torch.empty(3, config.num_attention_heads)) if learned else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """The shaped map, applied to the values: [B, H, T, head_dim]."""
        softmax = super().attend(query, key, value, context)
        length = query.size(2)
        count = torch.arange(1, value.size(2) + 1, device=value.device)[:, None]  # [keys, 1]
        mean = (value.float().cumsum(2) / count).to(value.dtype)
        groups = query.size(1) // value.size(1)
        identity, uniform = (x[:, :, -length:].repeat_interleave(groups, dim=1) for x in (value, mean))
        if self.shape_gains is None:
            return identity + softmax - uniform
        a, b, g = self.shape_gains[:, None, :, None, None]  # each (1, H, 1, 1)
        return a * identity + b * softmax - g * uniform  # type: ignore[no-any-return]
