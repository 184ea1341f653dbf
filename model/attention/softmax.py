"""Attend by softmax: grouped queries, QK-norm, rotary positions, sliding window, document mask, KV cache, gates.

The fused kernel is used unless the config caps the logits or adds a sink, which no fused kernel supports.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import handle_torch_function, has_torch_function

from plumbline.model.attention.block_sparse import block_sparse_attention
from plumbline.model.attention.context import AttentionContext, LayerCache
from plumbline.model.attention.kind import Attention
from plumbline.model.config import ModelConfig
from plumbline.model.kinds import Need
from plumbline.model.linear_cross_entropy import soft_cap
from plumbline.model.norms import make_head_norm
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import TensorRule, matrix_rules
from plumbline.model.rotary import apply_rotary


def _qk_trains(model: ModelConfig) -> bool:
    return not model.frozen_qk


def _qk_norm_trains(model: ModelConfig) -> bool:
    return not model.qk_norm_frozen


def _qk_norm_start(model: ModelConfig) -> float:
    return model.qk_norm_init


class SoftmaxAttention(Attention):
    """Attend [B, T, hidden_size] -> [B, T, hidden_size]; the parameterization decides the scale of the logits."""

    counts_for_gpu = False
    """Whether to make what a GPU makes on other devices too, to count its memory."""
    tensors = (
        *matrix_rules("q_proj", "width", "query", _qk_trains),
        *matrix_rules("k_proj", "width", "key_value", _qk_trains),
        *matrix_rules("v_proj", "width", "key_value"),
        *matrix_rules("g_proj", "width", "gate"),
        *matrix_rules("o_proj", "query", "width"),
        TensorRule(r"[qk]_norm\.weight", "qk_norm", start=_qk_norm_start, trains=_qk_norm_trains),
        # One number for each channel or head: its gradient shrinks with width
        TensorRule(r"q_whole_norm\.weight", "hidden_norm", ("width", "query"), _qk_norm_start, trains=_qk_norm_trains),
        TensorRule(
            r"k_whole_norm\.weight", "hidden_norm", ("width", "key_value"), _qk_norm_start, trains=_qk_norm_trains
        ),
        TensorRule("sinks", "hidden_norm", ("width", "heads")),
        TensorRule("value_mix", "hidden_scalar", start=0.5),
    )
    needs: ClassVar[tuple[Need, ...]] = ()
    rounds_stored = True
    serves_slots = True
    no_native_code: ClassVar[str | None] = None

    def __init__(
        self, config: ModelConfig, multipliers: Multipliers, layer: int, values: bool = True, output: bool = True
    ) -> None:
        """Build the attention of one block.

        Args:
            config: the model's switches.
            multipliers: the parameterization's constants.
            layer: number of the block.
            values: whether it projects the stream to values, or uses the stream itself.
            output: whether it has an output projection.
        """
        super().__init__(config, multipliers, layer)
        width, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.scale = multipliers.attention
        self.dropout = config.dropout
        self.cap = config.attn_logit_softcapping
        query_width = config.num_attention_heads * config.head_dim
        key_value_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, query_width, bias=bias)
        self.k_proj = nn.Linear(width, key_value_width, bias=bias)
        self.v_proj = nn.Linear(width, key_value_width, bias=bias) if values else nn.Identity()
        self.o_proj = nn.Linear(query_width, width, bias=bias) if output else nn.Identity()
        self.q_norm = make_head_norm(config) if config.qk_norm == "head" else nn.Identity()
        self.k_norm = make_head_norm(config) if config.qk_norm == "head" else nn.Identity()
        whole = config.qk_norm == "projection"
        self.q_whole_norm = nn.RMSNorm(query_width, eps=config.norm_eps) if whole else nn.Identity()
        self.k_whole_norm = nn.RMSNorm(key_value_width, eps=config.norm_eps) if whole else nn.Identity()
        gate_width = {"none": 0, "head": config.num_attention_heads, "elementwise": query_width}[config.attention_gate]
        self.g_proj = nn.Linear(width, gate_width, bias=bias) if gate_width else None
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads)) if config.attention_sink else None
        mixes = config.value_residual and layer > 0
        self.value_mix = nn.Parameter(torch.empty(2)) if mixes else None

    @classmethod
    def has_unregulated_logits(cls, config: ModelConfig) -> bool:
        """Return whether there is neither QK-norm nor a cap."""
        return config.qk_norm == "none" and config.attn_logit_softcapping is None

    @classmethod
    def scaled_module(cls, config: ModelConfig) -> str:
        """Return the queries' norm if there is one, which would cancel a factor on its input, else their projection."""
        return {"none": "q_proj", "head": "q_norm", "projection": "q_whole_norm"}[config.qk_norm]

    def _heads(self, x: Tensor) -> Tensor:
        """Split [B, T, H * head_dim] into heads, [B, T, H, head_dim]."""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def values(self, x: Tensor) -> Tensor:
        """Return the values of x [B, T, hidden_size], [B, num_key_value_heads, T, head_dim]."""
        return self._heads(self.v_proj(x)).transpose(1, 2)

    def queries_and_keys(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Return queries and keys of x [B, T, hidden_size], normalised and rotated, [B, heads, T, head_dim] each."""
        query = self.q_norm(self._heads(self.q_whole_norm(self.q_proj(x)))).transpose(1, 2)  # (B, H, T, head_dim)
        key = self.k_norm(self._heads(self.k_whole_norm(self.k_proj(x)))).transpose(1, 2)  # (B, H_kv, T, head_dim)
        if context.rotary is not None:
            query, key = apply_rotary(query, *context.rotary), apply_rotary(key, *context.rotary)
        return query, key

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Return the values after the map over positions, [B, H, T, head_dim]."""
        if isinstance(context.mask, BlockMask):
            return block_sparse_attention(query, key, value, context.mask, self.scale)
        dropout = self.dropout if self.training else 0.0
        causal = context.mask is None
        if query.size(2) == 1:
            causal = False  # separate: compiled for any length, one expression is symbolic, which the kernel refuses
        if self.cap is not None or self.sinks is not None:
            return explicit_attention(query, key, value, context.mask, self.scale, self.cap, self.sinks, dropout)
        as_on_gpu = value.is_cuda or self.counts_for_gpu
        return fused_attention(query, key, value, context.mask, self.scale, dropout, causal, as_on_gpu)

    def forward(self, x: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Attend from the T tokens of x to themselves and to the cached tokens."""
        query, key = self.queries_and_keys(x, context)
        value = self.values(x)  # (B, H_kv, T, head_dim)
        if self.value_mix is not None and context.first_values is not None:
            value = self.value_mix[0] * value + self.value_mix[1] * context.first_values
        if self.as_stored is not None:
            key, value = self.as_stored(key, value)
        if cache is not None:
            key, value = cache.append(key, value)
        mixed = self.attend(query, key, value, context).transpose(1, 2)  # (B, T, H, head_dim)
        if self.g_proj is not None:
            gate = self.g_proj(x).sigmoid()  # (B, T, H) or (B, T, H * head_dim)
            mixed = mixed * gate.view(*mixed.shape[:-1], -1)
        return self.o_proj(mixed.flatten(2))  # type: ignore[no-any-return]


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    causal: bool,
    as_on_gpu: bool,
) -> Tensor:
    """Compute attention with the kernel that torch chooses; shapes are those of `explicit_attention`.

    Args:
        query: [B, H, T, head_dim].
        key: [B, H_kv, keys, head_dim].
        value: as key.
        mask: boolean, or added to the logits.
        scale: of the logits.
        dropout: rate on the map.
        causal: without a mask, whether tokens only see earlier ones.
        as_on_gpu: whether to repeat shared heads where a GPU would else materialise the whole map: its flash kernel
            alone supports them, and takes neither a mask nor fp32.
    """
    shared = query.size(1) != key.size(1)
    if shared and as_on_gpu and (mask is not None or value.dtype == torch.float32):
        key, value, shared = _repeated(key, query.size(1)), _repeated(value, query.size(1)), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=shared
    )


def _repeated(shared: Tensor, heads: int) -> Tensor:
    """Repeat shared keys or values [B, H_kv, keys, head_dim] for each head."""
    return shared.repeat_interleave(heads // shared.size(1), dim=1)


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Compute attention step by step, for features that fused kernels lack; materialises the map [B, H, T, keys].

    Args:
        query: [B, H, T, head_dim].
        key: [B, H_kv, keys, head_dim].
        value: as key.
        mask: True where a query may attend; None means causal, with the queries at the last T keys.
        scale: of the logits.
        cap: logits become cap * tanh(logits / cap).
        sinks: [H], a logit per head that takes part in the softmax and has no value.
        dropout: rate on the map.
    """
    arguments = (query, key, value, mask, scale, cap, sinks, dropout)
    if has_torch_function((query,)):  # like the fused kernel, so that diagnostics can intercept both
        return handle_torch_function(explicit_attention, (query,), *arguments)
    key, value = _repeated(key, query.size(1)), _repeated(value, query.size(1))
    logits = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    logits = soft_cap(logits, cap)
    if mask is None:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
        mask = mask.tril(logits.size(-1) - logits.size(-2))
    logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, sink), dim=-1)
    weights = logits.softmax(-1)[..., : key.size(2)].to(value.dtype)
    return F.dropout(weights, dropout) @ value
