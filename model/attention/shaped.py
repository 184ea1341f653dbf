"""Attend by identity + softmax - uniform, so that a layer starts close to the identity.

    A = a I + b softmax(QK) - g C,   C_ij = 1/i for j <= i (what the softmax is when the logits are 0)

In the Shaped Transformer (arXiv 2306.17759) a = b = g = 1, and logits are also divided by tau_0 sqrt(width). In SAS
(arXiv 2311.01906, section 4) a, b and g are learned for each head and queries start at zero, so that A starts as the
identity.

Where no skip lies around attention, A also carries the stream from block to block. Then what it adds to the identity,
(a - 1) I + b softmax(QK) - g C, is a residual branch, and takes the residual multiplier of the parameterization.

Only the softmax part needs a map over pairs: the identity part is the values themselves and the uniform part their
running mean, so the fused kernel can be used and nothing of size [T, T] is allocated.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from plumbline.model.attention.context import AttentionContext
from plumbline.model.attention.softmax import SoftmaxAttention
from plumbline.model.config import ModelConfig
from plumbline.model.kinds import Need
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import TensorRule


def _query_std(model: ModelConfig, scale: float) -> float:
    """Start queries at zero under learned gains, so that the map starts as the identity."""
    return 0.0 if model.shaped_gains == "learned" else model.initializer_range * scale


class ShapedAttention(SoftmaxAttention):
    """Attend [B, T, hidden_size] -> [B, T, hidden_size] by the shaped map."""

    tensors = (
        *(
            replace(rule, std=_query_std) if rule.name == r"q_proj\.weight" else rule
            for rule in SoftmaxAttention.tensors
        ),
        TensorRule("shape_gains", "hidden_norm", ("width", "heads"), start=1.0),
    )
    needs = (
        Need({"attn_logit_softcapping": (None,), "attention_sink": (False,)}, "is another map"),
        Need({"document_mask": (False,), "sliding_window": (None,)}, "is centred over the whole prefix"),
    )
    own_keys = ("shaped_gains", "shaped_temperature")
    rounds_stored = True
    serves_slots = False
    varies_on_gpu = "takes running means by cumsum, for which torch has no deterministic kernel on a GPU"
    no_native_code = None

    def __init__(
        self, config: ModelConfig, multipliers: Multipliers, layer: int, values: bool = True, output: bool = True
    ) -> None:
        super().__init__(config, multipliers, layer, values, output)
        learned = config.shaped_gains == "learned"
        self.shape_gains = nn.Parameter(torch.empty(3, config.num_attention_heads)) if learned else None
        self.residual = 1.0
        """Multiplier of all that the map adds to the identity; a block without a skip around attention sets it."""

    @classmethod
    def gpu_compiler_refusal(cls, config: ModelConfig) -> str | None:
        """Refuse learned gains before torch 2.13, whose source has the fix; 2.11 was seen to fail on an H200."""
        if config.shaped_gains == "learned" and torch.__version__ < "2.13":
            return (
                f"torch {torch.__version__} cannot compile learned gains beside a running mean: install 2.13 or newer"
            )
        return None

    @classmethod
    def cautions(cls, config: ModelConfig) -> list[str]:
        """Warn of queries that start at zero and are never trained."""
        if not config.frozen_qk or config.shaped_gains != "learned":
            return []
        return [
            "model.frozen_qk = true with model.shaped_gains = learned: queries start at zero and stay there, so every "
            "token attends to all before it alike; set one of them to false or fixed"
        ]

    @classmethod
    def has_unregulated_logits(cls, _config: ModelConfig) -> bool:
        """Return False: the map stays close to the identity."""
        return False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Return the values after the shaped map, [B, H, T, head_dim]."""
        softmax = super().attend(query, key, value, context)
        length = query.size(2)
        count = torch.arange(1, value.size(2) + 1, device=value.device)[:, None]  # [keys, 1]
        mean = (value.float().cumsum(2) / count).to(value.dtype)
        groups = query.size(1) // value.size(1)
        identity, uniform = (x[:, :, -length:].repeat_interleave(groups, dim=1) for x in (value, mean))
        r = self.residual
        if self.shape_gains is not None:
            a, b, g = self.shape_gains[:, None, :, None, None]  # each (1, H, 1, 1)
            # On a stream a multiplies over the blocks, so r scales how far it is from 1, too
            identity = (a if r == 1 else 1 + r * (a - 1)) * identity
            softmax, uniform = b * softmax, g * uniform
        if r == 1:  # adds in another order, by which runs at the base and earlier ones keep their bits
            return identity + softmax - uniform
        return identity + r * (softmax - uniform)
