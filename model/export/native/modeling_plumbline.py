"""Run a Plumbline decoder in transformers, with every multiplier of training folded into its weights.

block      pre_norm, post_norm, sandwich_norm, norm_free, skipless: see WIRING
attention  softmax; shaped: identity + softmax - uniform (arXiv 2306.17759, 2311.01906); mixing: fixed matrices over
           positions (arXiv 2506.01115)

Attention goes through transformers' attention interface, and everything but the head and its soft cap is in
PlumblineModel, so that inference engines can substitute their own kernels. Shaped and mixing attention are exceptions:
they need the values of all earlier tokens, and support neither padding nor packed documents.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from .configuration_plumbline import PlumblineConfig

# transformers' name for the keys and values of earlier tokens, since 5.24 and before
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
# Norms before attention, after it, before the MLP, after it. A skipless block has no skip around attention
WIRING: dict[str, tuple[str | None, ...]] = {
    "pre_norm": ("input", None, "post_attention", None),
    "skipless": ("input", None, "post_attention", None),
    "post_norm": (None, "post_attention", None, "post_feedforward"),
    "sandwich_norm": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "norm_free": (None, None, None, None),
}


def make_norm(config: PlumblineConfig) -> nn.Module:
    """Return the norm over the residual stream."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
    return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


def rotary_tables(positions: Tensor, config: PlumblineConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions [B, T], each [B, 1, T, head_dim]; in fp32, then rounded once."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_frequencies is not None:
        frequencies = torch.tensor(config.rope_frequencies, dtype=torch.float32, device=positions.device)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * config.rope_magnitude).to(dtype), (angles.sin() * config.rope_magnitude).to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [B, H, T, head_dim], whose halves are pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat((-second, first), dim=-1) * rotary[1]


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attend with features that fused kernels lack: a cap on the logits, and sinks (s_aux, one logit per head)."""
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    logits = (query @ key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if attention_mask is not None and attention_mask.dtype == torch.bool:  # a caller's own, True where a token is seen
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    elif attention_mask is not None:
        logits = logits + attention_mask
    if s_aux is not None:
        logits = torch.cat((logits, s_aux.float()[None, :, None, None].expand(*logits.shape[:-1], 1)), dim=-1)
    weights = logits.softmax(-1)[..., : key.size(2)].to(value.dtype)
    mixed = F.dropout(weights, dropout, module.training) @ value
    return mixed.transpose(1, 2).contiguous(), weights


class PlumblineAttention(nn.Module):
    """Attend by softmax or the shaped map around it, [B, T, hidden_size] -> [B, T, hidden_size]."""

    def __init__(self, config: PlumblineConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.is_causal = True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.sliding_window = config.sliding_window
        width, bias = config.hidden_size, config.attention_bias
        query_width = config.num_attention_heads * config.head_dim
        key_value_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, query_width, bias=bias)
        self.k_proj = nn.Linear(width, key_value_width, bias=bias)
        skipless = config.block == "skipless"  # uses the stream itself as values, after the first block
        self.v_proj = nn.Identity() if skipless and layer_idx > 0 else nn.Linear(width, key_value_width, bias=bias)
        self.o_proj = nn.Identity() if skipless else nn.Linear(query_width, width, bias=bias)
        if config.qk_norm == "head":
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        elif config.qk_norm == "projection":
            self.q_whole_norm = nn.RMSNorm(query_width, eps=config.norm_eps)
            self.k_whole_norm = nn.RMSNorm(key_value_width, eps=config.norm_eps)
        heads = config.num_attention_heads
        gate_width = {"none": 0, "head": heads, "elementwise": query_width}[config.attention_gate]
        self.g_proj = nn.Linear(width, gate_width, bias=bias) if gate_width else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.attention_sink else None
        mixes_values = config.value_residual and layer_idx > 0
        self.value_mix = nn.Parameter(torch.full((2,), 0.5)) if mixes_values else None
        learned = config.attention == "shaped" and config.shaped_gains == "learned"
        self.shape_gains = nn.Parameter(torch.ones(3, heads)) if learned else None

    def heads(self, x: Tensor) -> Tensor:
        """Split [B, T, H * head_dim] into heads, [B, T, H, head_dim]."""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def values(self, x: Tensor) -> Tensor:
        """Return the values of x, [B, H_kv, T, head_dim]."""
        return self.heads(self.v_proj(x)).transpose(1, 2)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of x, normalised, [B, heads, T, head_dim] each."""
        query, key = self.q_proj(x), self.k_proj(x)
        if self.config.qk_norm == "projection":
            query, key = self.q_whole_norm(query), self.k_whole_norm(key)
        query, key = self.heads(query), self.heads(key)
        if self.config.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        return query.transpose(1, 2), key.transpose(1, 2)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        first_values: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend from the T tokens of hidden_states to themselves and to the cached tokens."""
        query, key = self.queries_and_keys(hidden_states)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        value = self.values(hidden_states)
        if self.value_mix is not None and first_values is not None:
            value = self.value_mix[0] * value + self.value_mix[1] * first_values
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        # transformers looks for this very call in the code before it lets users change the implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        options = {"scaling": self.scaling, "sliding_window": self.sliding_window}
        extras = {"softcap": self.config.attn_logit_softcapping, "s_aux": self.sinks}
        options |= {name: extra for name, extra in extras.items() if extra is not None}
        mixed, _ = attend(self, query, key, value, attention_mask, **options, **kwargs)
        mixed = mixed.reshape(*hidden_states.shape[:-1], -1, self.head_dim)  # (B, T, H, head_dim)
        if self.config.attention == "shaped":
            mixed = self.shape(mixed, value)
        if self.g_proj is not None:
            gate = self.g_proj(hidden_states).sigmoid()  # (B, T, H) or (B, T, H * head_dim)
            mixed = mixed * gate.view(*mixed.shape[:-1], -1)
        return self.o_proj(mixed.flatten(2))

    def shape(self, softmax: Tensor, value: Tensor) -> Tensor:
        """Return identity + softmax - uniform, the last being the running mean of all values so far."""
        length = softmax.size(1)
        count = torch.arange(1, value.size(2) + 1, device=value.device)[:, None]
        mean = (value.float().cumsum(2) / count).to(value.dtype)
        identity, uniform = (
            x[:, :, -length:].repeat_interleave(self.num_key_value_groups, dim=1).transpose(1, 2) for x in (value, mean)
        )
        if self.shape_gains is None:
            return identity + softmax - uniform
        a, b, g = self.shape_gains[:, None, None, :, None]  # each (1, 1, H, 1)
        return a * identity + b * softmax - g * uniform


class PlumblineMixing(nn.Module):
    """Mix positions by a fixed matrix per head; the cache stores the values as keys, too."""

    def __init__(self, config: PlumblineConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        width, heads, longest = config.hidden_size, config.num_attention_heads, config.max_position_embeddings
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * config.head_dim, width, bias=config.attention_bias)
        self.mixing = nn.Parameter(torch.zeros(heads, longest, longest), requires_grad=False)

    def forward(self, hidden_states: Tensor, *_: Any, past_key_values: Cache | None = None, **__: Any) -> Tensor:
        """Mix the T tokens of hidden_states with those in the cache."""
        value = self.v_proj(hidden_states).view(*hidden_states.shape[:-1], -1, self.head_dim).transpose(1, 2)
        if past_key_values is not None:
            _, value = past_key_values.update(value, value, self.layer_idx)
        end = value.size(2)
        weights = self.mixing[:, end - hidden_states.size(1) : end, :end]
        mixed = weights @ value.repeat_interleave(weights.size(0) // value.size(1), dim=1)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class XIELU(nn.Module):
    """Compute xIELU (arXiv 2411.13010): a_p x^2 + x/2 above zero, a_n (exp(x) - 1) - a_n x + x/2 below."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.zeros(1))
        self.alpha_n = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        positive, negative = F.softplus(self.alpha_p), 0.5 + F.softplus(self.alpha_n)
        below = (torch.expm1(torch.clamp(x, max=-1e-6)) - x) * negative
        return torch.where(x > 0, positive * x * x, below) + 0.5 * x


class PlumblineMLP(nn.Module):
    """Run a gated (swiglu, geglu) or plain (gelu, gelu_tanh, relu, relu2, shaped_relu, xielu) MLP."""

    def __init__(self, config: PlumblineConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.kind = config.mlp
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.mlp in ("swiglu", "geglu") else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        if config.mlp == "xielu":
            self.activation = XIELU()
        self.slope = 1 - width**-0.5  # of shaped_relu
        self.gain = math.sqrt(2 / (1 + self.slope**2))

    def activate(self, x: Tensor) -> Tensor:
        """Apply the nonlinearity, elementwise."""
        if self.kind == "xielu":
            return self.activation(x)
        if self.kind == "swiglu":
            return F.silu(x)
        if self.kind == "shaped_relu":
            return F.leaky_relu(x, self.slope) * self.gain
        if self.kind in ("relu", "relu2"):
            return F.relu(x) if self.kind == "relu" else F.relu(x).square()
        return F.gelu(x, approximate="tanh" if self.kind == "gelu_tanh" else "none")

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, hidden_size] -> [B, T, hidden_size]."""
        if self.gate_proj is None:
            return self.down_proj(self.activate(self.up_proj(x)))
        return self.down_proj(self.activate(self.gate_proj(x)) * self.up_proj(x))


class PlumblineDecoderLayer(GradientCheckpointingLayer):
    """Run one block of any kind."""

    def __init__(self, config: PlumblineConfig, layer_idx: int) -> None:
        super().__init__()
        self.wiring, self.parallel, self.skip = WIRING[config.block], config.parallel, config.skip_gain
        self.has_attention_skip = config.block != "skipless"
        if self.parallel:  # both branches read the norm before attention
            self.wiring = (self.wiring[0], None, None, None)
        for name in self.wiring:
            if name is not None:
                self.add_module(f"{name}_layernorm", make_norm(config))
        kind = PlumblineMixing if config.attention == "mixing" else PlumblineAttention
        self.self_attn = kind(config, layer_idx)
        self.mlp = PlumblineMLP(config)

    def norm(self, place: int, x: Tensor) -> Tensor:
        """Apply the norm at one of the four places of WIRING, or nothing."""
        name = self.wiring[place]
        return x if name is None else self.get_submodule(f"{name}_layernorm")(x)

    def forward(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Tensor:
        """Pass the residual stream through both branches; all other arguments go to attention."""
        normed = self.norm(0, hidden_states)
        branch = self.norm(1, self.self_attn(normed, *arguments, **kwargs))
        hidden_states = self.skip * hidden_states + branch if self.has_attention_skip else branch
        if not self.parallel:
            normed = self.norm(2, hidden_states)
        return self.skip * hidden_states + self.norm(3, self.mlp(normed))


class PlumblinePreTrainedModel(PreTrainedModel):
    """Hold what the two models below share."""

    config_class = PlumblineConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("PlumblineDecoderLayer",)
    _skip_keys_device_placement = ("past_key_values", "cache")
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: PlumblineConfig) -> None:
        if config.attn_logit_softcapping is not None or config.attention_sink:
            # Torch's fused kernel silently ignores both
            self._supports_sdpa = self._supports_flash_attn = False
        super().__init__(config)


class PlumblineModel(PlumblinePreTrainedModel):
    """Turn token ids into the hidden states that the head reads."""

    def __init__(self, config: PlumblineConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position_embedding == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(PlumblineDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config) if config.final_norm else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the blocks on input_ids [B, T] or inputs_embeds [B, T, hidden_size]; the cache may have either name.

        Hidden states are what enters each block and, as in classes of transformers, the last one after the final norm.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        past_key_values = cache if past_key_values is None else past_key_values
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if self.config.attention != "softmax":
            self._check_places(past + x.size(1), attention_mask, past_key_values, position_ids)
        if position_ids is None:
            position_ids = torch.arange(past, past + x.size(1), device=x.device)[None]

        mask = self._mask(x, attention_mask, past_key_values, position_ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        rotary = rotary_tables(position_ids, self.config, x.dtype) if self.embed_positions is None else None
        first_values = None
        if self.config.value_residual:
            first: Any = self.layers[0]
            first_values = first.self_attn.values(first.norm(0, x))
        keeps = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        kept: tuple[Tensor, ...] = ()
        for layer in self.layers:
            kept = (*kept, x) if keeps else ()
            x = layer(x, mask, rotary, first_values, past_key_values=past_key_values, **kwargs)
        x = self.norm(x)
        states = (*kept, x) if keeps else None
        return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=states, **{CACHE: past_key_values})

    def _check_places(
        self, end: int, attention_mask: Tensor | None, past_key_values: Cache | None, position_ids: Tensor | None
    ) -> None:
        """Refuse what an attention that counts every position up to `end` cannot leave out."""
        kind, longest = self.config.attention, self.config.max_position_embeddings
        if past_key_values is not None and past_key_values.is_compileable:
            raise ValueError(
                f"attention = {kind} reads all that a cache holds, and a static one holds places without a token: "
                "leave out cache_implementation, or give a DynamicCache"
            )
        masks = attention_mask is not None and not (attention_mask.ndim == 2 and attention_mask.all())
        # Positions begin anew with each packed document
        if masks or (position_ids is not None and (position_ids.diff() != 1).any()):
            raise ValueError(
                f"attention = {kind} counts every position: no padding, no mask [B, 1, T, S], no packed documents, run "
                "one text at a time"
            )
        if kind == "mixing" and end > longest:
            raise ValueError(f"attention = {kind} has weights for {longest} tokens, and these are {end}: give fewer")

    def _mask(
        self, x: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None, position_ids: Tensor
    ) -> Tensor | None:
        """Return the mask in the form that the attention interface expects."""
        if self.config.attention == "mixing":
            return None
        make = create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask
        return make(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: past_key_values},
        )


class PlumblineForCausalLM(PlumblinePreTrainedModel, GenerationMixin):
    """Predict tokens with the decoder and its head, with a soft cap on the logits if configured."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - a constant of transformers

    def __init__(self, config: PlumblineConfig) -> None:
        super().__init__(config)
        self.model = PlumblineModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, vocab_size], and the loss if labels [B, T] are given.

        `generate` only counts positions from the end of the padding if position_ids is a named argument here.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, return_dict=True, **kwargs)
        places = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, places])
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            # Trainer says here how many labels a step has, and then does not divide by its micro-batches itself
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        passed = {"hidden_states": outputs.hidden_states, CACHE: getattr(outputs, CACHE)}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **passed)
