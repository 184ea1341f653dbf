"""Random mixing in place of attention: a map over positions that is drawn once and looks at no token.

MixiT (arXiv 2506.01115): for each head A = I + N - rowmean(N), N normal below and on the diagonal, so that every row
sums to 1; values and output projection are learned. It tells what a task needs of attention: retrieval and induction
fail, arithmetic and memorisation do not. The matrices are parameters that do not train: a checkpoint holds them, and
reloading is exact.
"""

import torch
from torch import Tensor, nn

from plumbline.model.attention.context import AttentionContext, LayerCache
from plumbline.model.config import ModelConfig


class MixingAttention(nn.Module):
    """[B, T, hidden_size] -> [B, T, hidden_size], T up to max_position_embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, heads, longest = config.hidden_size, config.num_attention_heads, config.max_position_embeddings
        self.head_dim = config.head_dim
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * config.head_dim, width, bias=config.attention_bias)
        self.mixing = nn.Parameter(torch.empty(heads, longest, longest), requires_grad=False)

    def forward(self, x: Tensor, _context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Mix the T tokens of x with those that the cache holds."""
        value = self.v_proj(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)  # (B, H_kv, T, head_dim)
        if cache is not None:
            _, value = cache.append(value, value)
        end = value.size(2)
        groups = self.mixing.size(0) // value.size(1)
        weights = self.mixing[:, end - x.size(1) : end, :end]  # (H, T, keys); row i depends only on i
        mixed = weights @ value.repeat_interleave(groups, dim=1)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def draw_mixing(shape: tuple[int, ...], least_std: float, generator: torch.Generator) -> Tensor:
    """The matrices of all heads, [H, T, T] fp32, on the CPU.

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
