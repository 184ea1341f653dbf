"""Mix positions by random matrices instead of attention; they are drawn once and do not depend on the tokens.

This is MixiT (arXiv 2506.01115): for each head A = I + N - rowmean(N), N normal below and on the diagonal, so that
every row sums to 1; values and output projection are learned. It shows which tasks need attention: retrieval and
induction fail, arithmetic and memorisation do not. The matrices are frozen parameters, so checkpoints contain them and
reloading is exact.
"""

import math

import torch
from torch import Tensor, nn

from plumbline.model.attention.context import AttentionContext, LayerCache
from plumbline.model.attention.kind import Attention
from plumbline.model.config import ModelConfig
from plumbline.model.kinds import Need
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import TensorRule, matrix_rules


def _least_std(model: ModelConfig, _: float) -> float:
    return 1 / math.sqrt(model.max_position_embeddings * model.head_dim)


def _never(_: ModelConfig) -> bool:
    return False


def draw_mixing(shape: tuple[int, ...], least_std: float, generator: torch.Generator) -> Tensor:
    """Draw the matrices of all heads, [H, T, T] fp32, on the CPU.

    The standard deviation is drawn for each head between `least_std`, (T head_dim)^-1/2, and T^-1/2. Head 0 is a fixed
    sink: half on the token itself, half on the first.
    """
    heads, length, _ = shape
    std = least_std + torch.rand(heads, 1, 1, generator=generator) * (length**-0.5 - least_std)
    noise = (torch.randn(heads, length, length, generator=generator) * std).tril()
    allowed = torch.arange(1, length + 1)[:, None]
    noise = (noise - noise.sum(-1, keepdim=True) / allowed).tril()
    matrices: Tensor = torch.eye(length) + noise
    matrices[0] = 0.5 * torch.eye(length)
    matrices[0, :, 0] += 0.5
    return matrices


class MixingAttention(Attention):
    """Mix [B, T, hidden_size] -> [B, T, hidden_size], T up to max_position_embeddings."""

    tensors = (
        *matrix_rules("v_proj", "width", "key_value"),
        *matrix_rules("o_proj", "query", "width"),
        TensorRule("mixing", "mixing", std=_least_std, draw=draw_mixing, trains=_never),
    )
    needs = (
        Need({"document_mask": (False,), "sliding_window": (None,)}, "mixes the whole prefix"),
        Need(
            {
                "qk_norm": ("none",),
                "attn_logit_softcapping": (None,),
                "attention_sink": (False,),
                "attention_gate": ("none",),
                "value_residual": (False,),
                "frozen_qk": (False,),
                "rope_theta": (ModelConfig.model_fields["rope_theta"].default,),
                "rope_scaling": (None,),
            },
            "has neither queries nor keys",
        ),
    )
    map_flops = 4  # one product, with a map that has no gradient
    no_native_code = None

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        super().__init__(config, multipliers, layer)
        width, heads, longest = config.hidden_size, config.num_attention_heads, config.max_position_embeddings
        self.head_dim = config.head_dim
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * config.head_dim, width, bias=config.attention_bias)
        self.mixing = nn.Parameter(torch.empty(heads, longest, longest), requires_grad=False)

    def forward(self, x: Tensor, _context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Mix the T tokens of x with those in the cache."""
        value = self.v_proj(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)  # (B, H_kv, T, head_dim)
        if cache is not None:
            _, value = cache.append(value, value)
        end = value.size(2)
        groups = self.mixing.size(0) // value.size(1)
        weights = self.mixing[:, end - x.size(1) : end, :end]  # (H, T, keys); row i depends only on i
        mixed = weights @ value.repeat_interleave(groups, dim=1)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    @classmethod
    def scaled_module(cls, _config: ModelConfig) -> None:
        """Return None, since there are no logits."""
