"""Which stock Hugging Face class computes what a decoder computes, and its configuration and weights.

Each target names the switches it can express; anything else is refused with the switch and the remedy, because a
folder that loads and computes something else is worse than none.
"""

from collections.abc import Callable
from typing import Any

import torch

from model.config import ModelConfig
from model.export.fold import Weights, fold_multipliers
from model.multipliers import Multipliers

Export = tuple[dict[str, Any], Weights]  # entries of config.json ("model_type" included), weights by the stock names


def to_hugging_face(target: str, config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
    """Configuration and fp32 weights for a stock class.

    Args:
        target: auto, llama, qwen3, gpt2 or granite. auto takes the one that has the decoder's switches.
        config: the decoder's shape.
        multipliers: what its forward pass applies.
        weights: its fp32 weights by name.

    Raises:
        ValueError: the target is unknown or cannot express a switch of this decoder.
    """
    if target == "auto":
        target = "gpt2" if config.norm == "layernorm" else "qwen3" if config.qk_norm == "head" else "llama"
    if target not in TARGETS:
        raise ValueError(f"--target {target}: unknown; known targets: auto, {', '.join(TARGETS)}")
    return TARGETS[target](config, multipliers, weights)


def _require(target: str, config: ModelConfig, **wanted: Any) -> None:
    """Refuse a decoder whose switches differ from what the target computes."""
    for key, value in wanted.items():
        found = getattr(config, key)
        allowed = value if isinstance(value, tuple) else (value,)
        if found not in allowed:
            expected = " or ".join(str(item) for item in allowed)
            raise ValueError(
                f"--target {target} has model.{key} = {expected}; this model has {found}: try another target"
            )


def _require_whole_heads(target: str, config: ModelConfig) -> None:
    """Refuse what some stock classes refuse when they are built, head_dim or not."""
    width, heads = config.hidden_size, config.num_attention_heads
    if width % heads:
        raise ValueError(
            f"--target {target} needs model.hidden_size to be a multiple of model.num_attention_heads; this model has "
            f"{width} and {heads}: try another target"
        )


def _llama_like(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
    }


def _qwen3(config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
    _require("qwen3", config, norm="rmsnorm", position_embedding="rope", mlp="swiglu", qk_norm="head", mlp_bias=False)
    _require("qwen3", config, final_logit_softcapping=None)
    entries = {"model_type": "qwen3", **_llama_like(config), "head_dim": config.head_dim}
    if config.sliding_window is not None:
        entries |= {"use_sliding_window": True, "sliding_window": config.sliding_window, "max_window_layers": 0}
    return entries, fold_multipliers(weights, config, multipliers)


def _llama(config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
    _require("llama", config, norm="rmsnorm", position_embedding="rope", mlp="swiglu", qk_norm="none")
    _require("llama", config, final_logit_softcapping=None, sliding_window=None)
    _require_whole_heads("llama", config)
    entries = {"model_type": "llama", **_llama_like(config), "head_dim": config.head_dim, "mlp_bias": config.mlp_bias}
    return entries, fold_multipliers(weights, config, multipliers)


def _granite(config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
    """The one stock class with all four multipliers: weights stay as trained, so training can go on from them."""
    _require("granite", config, norm="rmsnorm", position_embedding="rope", mlp="swiglu", qk_norm="none")
    _require("granite", config, final_logit_softcapping=None, sliding_window=None)
    _require_whole_heads("granite", config)
    _require("granite", config, head_dim=config.hidden_size // config.num_attention_heads)
    entries = {
        "model_type": "granite",
        **_llama_like(config),
        "mlp_bias": config.mlp_bias,
        "attention_multiplier": multipliers.attention,
        "embedding_multiplier": multipliers.embedding,
        "residual_multiplier": multipliers.residual,
        "logits_scaling": 1 / multipliers.output,
    }
    return entries, weights


def _gpt2(config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
    """GPT-2 fuses q, k and v, stores matrices transposed, and always has biases: absent ones become zeros."""
    activations = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
    _require("gpt2", config, norm="layernorm", position_embedding="learned", mlp=tuple(activations), qk_norm="none")
    _require("gpt2", config, final_logit_softcapping=None, sliding_window=None)
    _require("gpt2", config, num_key_value_heads=config.num_attention_heads)
    _require_whole_heads("gpt2", config)
    _require("gpt2", config, head_dim=config.hidden_size // config.num_attention_heads)
    entries = {
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_position_embeddings,
        "activation_function": activations[config.mlp],
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }
    folded = fold_multipliers(weights, config, multipliers)

    def bias(module: str, size: int) -> torch.Tensor:
        return folded.get(f"{module}.bias", torch.zeros(size))

    width = config.hidden_size
    stock = {
        "transformer.wte.weight": folded["model.embed_tokens.weight"],
        "transformer.wpe.weight": folded["model.embed_positions.weight"],
        "transformer.ln_f.weight": folded["model.norm.weight"],
        "transformer.ln_f.bias": bias("model.norm", width),
    }
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"transformer.h.{i}"
        for norm, stock_norm in (("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2")):
            stock[f"{theirs}.{stock_norm}.weight"] = folded[f"{ours}.{norm}.weight"]
            stock[f"{theirs}.{stock_norm}.bias"] = bias(f"{ours}.{norm}", width)
        projections = [f"{ours}.self_attn.{name}_proj" for name in "qkv"]
        stock[f"{theirs}.attn.c_attn.weight"] = torch.cat([folded[f"{p}.weight"] for p in projections]).T.contiguous()
        stock[f"{theirs}.attn.c_attn.bias"] = torch.cat([bias(p, width) for p in projections])
        for module, stock_module, size in (
            ("self_attn.o_proj", "attn.c_proj", width),
            ("mlp.up_proj", "mlp.c_fc", config.intermediate_size),
            ("mlp.down_proj", "mlp.c_proj", width),
        ):
            stock[f"{theirs}.{stock_module}.weight"] = folded[f"{ours}.{module}.weight"].T.contiguous()
            stock[f"{theirs}.{stock_module}.bias"] = bias(f"{ours}.{module}", size)
    if not config.tie_word_embeddings:
        stock["lm_head.weight"] = folded["lm_head.weight"]
    return entries, stock


TARGETS: dict[str, Callable[[ModelConfig, Multipliers, Weights], Export]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "granite": _granite,
}
