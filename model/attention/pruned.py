"""Prune the context: each layer learns which earlier tokens it no longer needs and drops them permanently.

The method is section 3 of Dynamic Context Pruning for Efficient and Interpretable Autoregressive Transformers (arXiv
2305.15805). A token q votes on every earlier token k with the score e(q, k) = Q(x_q) K(x_k) / sqrt(rank) + b, shared by
all heads. The vote keep(q, k) is the first entry of alpha-entmax over (e, 0): soft at alpha = 1 (a sigmoid), a step as
alpha grows. A token dropped once stays dropped: token n sees k with the weight

    c(n, k) = prod of keep(q, k) over k < q <= n,

which enters the attention logits as log c. Outside training a vote is e > 0, and a dropped token leaves the KV cache.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbline.model.attention.context import AttentionContext
from plumbline.model.attention.softmax import SoftmaxAttention, fused_attention
from plumbline.model.config import ModelConfig
from plumbline.model.kinds import Need
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import TensorRule, matrix_rules

TINY = torch.finfo(torch.float32).tiny
"""Replaces 0 inside the logarithm: a smaller number may be flushed to 0."""
BISECTIONS = 30
SHRINK_BELOW = 0.75
"""A cache is compacted when the fullest row needs less than this share of its slots."""


class SparseSigmoid(torch.autograd.Function):
    """Compute the first entry of alpha-entmax over (e, 0), elementwise, fp32 (arXiv 2305.15805, equation 7).

    It is the p in [0, 1] with p^(alpha - 1) - (1 - p)^(alpha - 1) = (alpha - 1) e: found by bisection. alpha = 1 is the
    sigmoid, and alpha = 2 is clip((e + 1) / 2, 0, 1).
    """

    @staticmethod
    def forward(ctx: Any, score: Tensor, alpha: Tensor) -> Tensor:
        """Return the votes in [0, 1] for scores of any shape; alpha is a scalar >= 1."""
        power = (alpha.float() - 1).clamp_min(1e-3)
        low, high = torch.zeros_like(score), torch.ones_like(score)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            # expm1 keeps the difference of two powers exact when they are close to 1
            value = torch.expm1(power * middle.log()) - torch.expm1(power * torch.log1p(-middle))
            above = value > power * score
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        keep = (low + high) / 2
        keep = torch.where(power * score >= 1, 1.0, torch.where(power * score <= -1, 0.0, keep))
        ctx.save_for_backward(keep, power)
        return keep

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Multiply by 1 / (p^(alpha - 2) + (1 - p)^(alpha - 2)) inside the support and by 0 outside."""
        keep, power = ctx.saved_tensors
        inside = (keep > 0) & (keep < 1)
        p = torch.where(inside, keep, 0.5)
        slope = 1 / (p ** (power - 1) + (1 - p) ** (power - 1))
        return torch.where(inside, slope, 0.0) * gradient, None


class PrunedCache:
    """Hold the keys and values of the tokens that one layer has kept, in as few slots as the fullest row needs."""

    def __init__(self, batch: int, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        heads, size, rank = config.num_key_value_heads, config.head_dim, config.pruning_rank
        self.keys = torch.empty(batch, heads, 0, size, device=device, dtype=dtype)
        self.values = torch.empty(batch, heads, 0, size, device=device, dtype=dtype)
        self.offers = torch.empty(batch, 0, rank, device=device, dtype=dtype)
        self.alive = torch.empty(batch, 0, dtype=torch.bool, device=device)
        self.length = 0
        """Tokens seen, dropped ones included."""

    def append(self, keys: Tensor, values: Tensor, offers: Tensor) -> None:
        """Append T new tokens, all alive."""
        self.keys, self.values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
        self.offers = torch.cat((self.offers, offers), dim=1)
        self.alive = F.pad(self.alive, (0, offers.size(1)), value=True)
        self.length += offers.size(1)

    def keep(self, alive: Tensor) -> None:
        """Drop all slots that are False in alive [B, slots]; their memory is freed once there are enough of them."""
        self.alive = alive
        needed = int(alive.sum(1).max())
        if needed >= SHRINK_BELOW * alive.size(1):
            return
        slots = alive.int().argsort(dim=1, descending=True, stable=True)[:, :needed]  # [B, needed]
        self.alive = alive.gather(1, slots)
        self.offers = self.offers.gather(1, slots[..., None].expand(-1, -1, self.offers.size(-1)))
        index = slots[:, None, :, None].expand(-1, self.keys.size(1), -1, self.keys.size(-1))
        self.keys, self.values = self.keys.gather(2, index), self.values.gather(2, index)


class PrunedAttention(SoftmaxAttention):
    """Attend [B, T, hidden_size] -> [B, T, hidden_size] to what is kept."""

    tensors = (
        *SoftmaxAttention.tensors,
        *matrix_rules("(ask|offer)_proj", "width", "fixed"),
        TensorRule("keep_bias", "hidden_scalar", start=2.0),  # everything is kept at first (arXiv 2305.15805)
    )
    needs = (
        Need({"document_mask": (False,), "sliding_window": (None,)}, "has a mask of its own"),
        Need({"attn_logit_softcapping": (None,), "attention_sink": (False,)}, "needs the fused kernel"),
        Need({"attention_gate": ("none",), "value_residual": (False,)}, "has neither"),
    )
    own_keys = ("pruning_rank",)
    grafted = (".ask_proj.weight", ".offer_proj.weight", ".keep_bias")
    rounds_stored = False
    serves_slots = False
    varies_on_gpu = "adds up votes by cumsum, for which torch has no deterministic kernel on a GPU"
    no_native_code = "no engine forgets keys and values layer by layer, as launcher/generate.py does"
    alpha: Tensor

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        super().__init__(config, multipliers, layer)
        self.rank = config.pruning_rank
        self.ask_proj = nn.Linear(config.hidden_size, self.rank, bias=False)
        self.offer_proj = nn.Linear(config.hidden_size, self.rank, bias=False)
        self.keep_bias = nn.Parameter(torch.empty(1))
        # Not a float, which would be baked into a compiled block; on the CPU, so that it has a value even if weights
        # are still on meta
        self.register_buffer("alpha", torch.ones((), device="cpu"), persistent=False)
        self.kept: Tensor | None = None
        """Share of earlier tokens that the last forward pass kept, averaged over queries, for reports."""

    @classmethod
    def new_cache(cls, config: ModelConfig, batch: int, _capacity: int, like: Tensor) -> PrunedCache:
        """Return an empty cache of one layer, which grows as needed."""
        return PrunedCache(batch, config, like.device, like.dtype)

    def _votes(self, score: Tensor) -> Tensor:
        """Return votes in [0, 1], where 1 means keep."""
        if not self.training:
            return (score > 0).float()
        return SparseSigmoid.apply(score, self.alpha)  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, x: Tensor, context: AttentionContext, cache: PrunedCache | None = None) -> Tensor:  # type: ignore[override]
        """Attend from the T tokens of x to the kept tokens among them and in the cache."""
        query, key = self.queries_and_keys(x, context)
        value, asks, offers = self.values(x), self.ask_proj(x), self.offer_proj(x)
        length = x.size(1)
        if cache is not None:
            cache.append(key, value, offers)
            key, value, offers = cache.keys, cache.values, cache.offers
        score = (asks @ offers.transpose(1, 2)).float() / math.sqrt(self.rank) + self.keep_bias.float()  # (B, T, keys)
        own = torch.ones_like(score[0], dtype=torch.bool).tril(offers.size(1) - length)  # the token itself included
        past = own.tril(offers.size(1) - length - 1)
        vote = self._votes(score)
        log_kept = torch.where(past, (vote + TINY).log(), 0.0).cumsum(1)  # log c, (B, T, keys)
        bias = torch.where(own, log_kept, -torch.inf)
        if not self.training:
            bias = bias.masked_fill(log_kept < -1, -torch.inf)
        if cache is not None:
            bias = bias.masked_fill(~cache.alive[:, None], -torch.inf)
            cache.keep(bias[:, -1] == 0)
        kept = log_kept.exp() * past
        share = kept.sum((1, 2)) / past.sum().clamp_min(1)  # (B)
        self.kept = share.detach().mean()
        if context.kept is not None:
            context.kept.shares.append(share)
        dropout = self.dropout if self.training else 0.0
        mask = bias[:, None].to(query.dtype)
        mixed = fused_attention(query, key, value, mask, self.scale, dropout, causal=False, as_on_gpu=query.is_cuda)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def set_alpha(model: nn.Module, alpha: float) -> None:
    """Set how sharp the votes of all layers are in training, >= 1."""
    for module in model.modules():
        if isinstance(module, PrunedAttention):
            module.alpha.fill_(alpha)
