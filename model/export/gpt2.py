"""Convert weights to GPT-2's and back: q, k and v in one projection, matrices transposed, absent biases as zeros."""

import torch

from plumbline.model.config import ModelConfig
from plumbline.model.export.fold import Weights
from plumbline.model.export.stock import Export, StockClass

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
MODULES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
"""Modules of a block that have a direct counterpart in GPT-2."""


def _gpt2(config: ModelConfig, weights: Weights) -> Export:
    entries = {
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_position_embeddings,
        "n_ctx": config.max_position_embeddings,  # its older name, which llama.cpp's converter reads
        "activation_function": ACTIVATIONS[config.mlp],
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }

    def parts(module: str) -> tuple[torch.Tensor, torch.Tensor]:
        weight = weights[f"{module}.weight"]
        bias = weights.get(f"{module}.bias", torch.zeros(weight.size(0)))
        return weight.T.contiguous() if weight.ndim == 2 else weight, bias

    final, final_bias = parts("model.norm")
    stock = {
        "transformer.wte.weight": weights["model.embed_tokens.weight"],
        "transformer.wpe.weight": weights["model.embed_positions.weight"],
        "transformer.ln_f.weight": final,
        "transformer.ln_f.bias": final_bias,
    }
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"transformer.h.{i}"
        for module, stock_module in MODULES.items():
            name = f"{theirs}.{stock_module}"
            stock[f"{name}.weight"], stock[f"{name}.bias"] = parts(f"{ours}.{module}")
        projections, biases = zip(*(parts(f"{ours}.self_attn.{name}_proj") for name in "qkv"), strict=True)
        stock[f"{theirs}.attn.c_attn.weight"] = torch.cat(projections, dim=1).contiguous()
        stock[f"{theirs}.attn.c_attn.bias"] = torch.cat(biases)
    if not config.tie_word_embeddings:
        stock["lm_head.weight"] = weights["lm_head.weight"]
    return entries, stock


def our_names(stock: Weights, layers: int) -> Weights:
    """Return GPT-2 weights, given without the prefix `transformer.`, under our names: the inverse.

    Raises:
        ValueError: the weights have more blocks than `layers`.
    """
    if more := sorted(name for name in stock if name.startswith(f"h.{layers}.")):
        raise ValueError(f"n_layer = {layers}, and the files hold {more[0]} as well: correct n_layer in config.json")
    weights = {
        "model.embed_tokens.weight": stock["wte.weight"],
        "model.embed_positions.weight": stock["wpe.weight"],
        "model.norm.weight": stock["ln_f.weight"],
        "model.norm.bias": stock["ln_f.bias"],
    }
    if "lm_head.weight" in stock:
        weights["lm_head.weight"] = stock["lm_head.weight"]
    for i in range(layers):
        ours, theirs = f"model.layers.{i}", f"h.{i}"
        for module, stock_module in MODULES.items():
            weight, bias = stock[f"{theirs}.{stock_module}.weight"], stock[f"{theirs}.{stock_module}.bias"]
            weights[f"{ours}.{module}.weight"] = weight.T.contiguous() if weight.ndim == 2 else weight
            weights[f"{ours}.{module}.bias"] = bias
        fused = (stock[f"{theirs}.attn.c_attn.{kind}"].chunk(3, dim=-1) for kind in ("weight", "bias"))
        for letter, weight, bias in zip("qkv", *fused, strict=True):
            weights[f"{ours}.self_attn.{letter}_proj.weight"] = weight.T.contiguous()
            weights[f"{ours}.self_attn.{letter}_proj.bias"] = bias
    return weights


GPT2 = StockClass(
    _gpt2,
    {
        "norm": ("layernorm",),
        "norm_bias": None,
        "position_embedding": ("learned",),
        "mlp": tuple(ACTIVATIONS),
        "attention_bias": None,
        "mlp_bias": None,
    },
    whole_heads=True,
    free_head_dim=False,
    equal_heads=True,
)
