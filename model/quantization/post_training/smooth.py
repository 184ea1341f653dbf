"""Move part of the inputs' range into the weights, where it is easier to round (SmoothQuant, arXiv 2211.10438).

    x W^T = (x / s) (W s)^T      s_j = max|x_j|^alpha / max|W_:,j|^(1 - alpha)

A layer divides its own input, which is exact whatever precedes it. If that is a norm whose output nothing else reads,
its gains could be divided instead, and nothing would be stored for it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from plumbline.model.quantization.layers import QuantizedLinear

# Norms of the form "times weight, plus bias"; not those of the Gemma classes, which multiply by 1 + weight
NORMS = ("RMSNorm", "LayerNorm", "LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MistralRMSNorm", "GraniteRMSNorm")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.g_proj")
PRUNING = ("self_attn.ask_proj", "self_attn.offer_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
ENDS = ("self_attn.o_proj", "mlp.down_proj")
GPT2: dict[str, tuple[str, ...]] = {"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)}


def smooth_scale(weights: Sequence[Tensor], largest: Tensor, alpha: float) -> Tensor:
    """Return the scale [in] that divides the inputs of layers and multiplies their columns.

    Args:
        weights: weights of the layers that share the input, [out, in] each.
        largest: max |x| of each input on the calibration text, [in].
        alpha: share of the inputs' range that moves; 0 equalises the columns of the weights, 1 the inputs.
    """
    columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).float()
    used = (largest > 0) & (columns > 0)  # an input that is always 0 does not tell its size on other text
    return torch.where(used, largest.float() ** alpha / columns.clamp_min(1e-30) ** (1 - alpha), 1.0)


def kept_input_scales(block: nn.Module) -> dict[str, Tensor]:
    """Return the input scales that no norm of a block can take, by the names of the layers that divide by them.

    Norms are known to feed only linear layers in pre-norm blocks of ours, parallel or not, of Llama and similar
    classes, and in GPT-2's. Layers after a nonlinearity or after attention keep theirs.
    """
    folded = [layer for _, layers, _ in foldable(block) for layer in layers]
    return {
        name: layer.input_scale
        for name, layer in block.named_modules()
        if isinstance(layer, QuantizedLinear) and layer.input_scale is not None and layer not in folded
    }


def foldable(block: nn.Module) -> Iterator[tuple[nn.Module, list[QuantizedLinear], Tensor]]:
    """Yield each norm whose gain can take an input scale, the layers that have it, and the scale."""
    for norm_name, readers in _norms_and_readers(block).items():
        norm = block.get_submodule(norm_name)
        layers = [layer for name in readers if isinstance(layer := block.get_submodule(name), QuantizedLinear)]
        scales = [layer.input_scale for layer in layers]
        if not scales or len(layers) < len(readers) or (first := scales[0]) is None:
            continue
        same = all(scale is not None and torch.equal(scale, first) for scale in scales)
        if same and type(norm).__name__ in NORMS:
            yield norm, layers, first


def _norms_and_readers(block: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the norms of a block that feed only linear layers, each with these layers."""
    linears = {name for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    norms = {name for name, _ in block.named_children() if name.startswith("ln_") or name.endswith("norm")}
    if norms == GPT2.keys() and linears == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}:
        return GPT2
    attention = tuple(name for name in (*ATTENTION, *PRUNING) if name in linears)
    mlp = tuple(name for name in MLP if name in linears)
    if linears != {*attention, *mlp, *ENDS}:
        return {}  # an unknown kind, or skipless: without an o_proj, and its values are the normed stream itself
    if norms == {"input_layernorm", "post_attention_layernorm"}:
        return {"input_layernorm": attention, "post_attention_layernorm": mlp}
    return {"input_layernorm": (*attention, *mlp)} if norms == {"input_layernorm"} else {}
