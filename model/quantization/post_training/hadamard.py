"""Rotate outlier channels away before rounding, with matrices folded into the weights (QuaRot, arXiv 2404.00456).

The residual stream x becomes x Q with an orthogonal Q: layers that write to the stream are rotated, layers that read
from it are rotated back, and an RMSNorm without gains commutes with Q. Before that, gains are folded into the next
layers, and a tied head gets its own matrix. The values of each head are rotated likewise, by one R for all heads and
layers, and rotated back in o_proj. No work is left for run time: logits are the same in real arithmetic.
"""

import logging
from collections.abc import Iterable, Iterator
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn

from plumbline.model.blocks import BLOCKS
from plumbline.model.decoder import CausalLM
from plumbline.model.norms import SingleScaleRMSNorm
from plumbline.model.quantization.post_training.calibration import decoder_blocks

LOG = logging.getLogger(__name__)

STOCK = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
# Our switches -> the values that allow rotating the stream and the values of a head
ALLOWED = {
    "block": tuple(name for name, block in BLOCKS.items() if block.rotates),
    "norm": ("rmsnorm", "single_scale_rmsnorm"),
    "branch_gain": ("fixed", "scalar"),
    "embedding_projection": (False,),
}


def check_rotation(model: nn.Module) -> None:
    """Refuse models whose stream cannot be rotated.

    Raises:
        ValueError: says what prevents it.
    """
    if isinstance(model, CausalLM):
        for key, allowed in ALLOWED.items():
            actual = getattr(model.config, key)
            if actual not in allowed:
                fitting = " or ".join(str(value) for value in allowed)
                raise ValueError(f"no rotation folds into model.{key} = {actual}: it has to be {fitting}")
    elif type(model).__name__ not in STOCK:
        raise ValueError(f"no rotation is known for {type(model).__name__}: only for CausalLM, {', '.join(STOCK)}")


@torch.no_grad()
def rotate(model: nn.Module, seed: int = 0) -> None:
    """Rotate the stream and the values of each head by random Hadamard matrices, in place.

    A width for which `hadamard` has none is rotated by a random orthogonal matrix instead, with a warning.

    Args:
        model: a pre-norm CausalLM with RMSNorm, or a stock Llama, Qwen2, Qwen3 or Mistral.
        seed: seed of the signs.

    Raises:
        ValueError: the model is of another kind.
    """
    check_rotation(model)
    _untie(model)
    _fold_gains(model)
    weight = model.get_parameter("model.embed_tokens.weight")
    generator = torch.Generator().manual_seed(seed)
    turn = random_rotation(weight.size(1), generator).to(weight.device)
    for name in ("model.embed_tokens.weight", "model.embed_positions.weight", "lm_head.weight"):
        if name in dict(model.named_parameters()):
            _set(model.get_parameter(name), model.get_parameter(name).double() @ turn)
    size = _head_size(model)
    head_turn = random_rotation(size, generator).to(weight.device)
    for block in decoder_blocks(model)[1]:
        for reader in _readers(block, attention=True, mlp=True):
            _set(reader.weight, reader.weight.double() @ turn)
        for name in WRITERS:
            _turn_output(_linear(block, name), turn)
        if _mixes_linearly(model):
            _turn_output(_linear(block, "self_attn.v_proj"), head_turn)
            output = _linear(block, "self_attn.o_proj").weight
            _set(output, (output.double().unflatten(1, (-1, size)) @ head_turn).flatten(1))


def random_rotation(size: int, generator: torch.Generator) -> Tensor:
    """Return an orthogonal matrix [size, size] in fp64: a Hadamard matrix with random signs, or one from QR."""
    matrix = hadamard(size)
    if matrix is not None:
        signs = torch.randint(2, (size,), generator=generator).double() * 2 - 1
        return cast(Tensor, signs[:, None] * matrix / size**0.5)
    _warn_of_size(size)
    turn, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return cast(Tensor, turn)


@cache  # a sweep of recipes rotates many models of one size
def _warn_of_size(size: int) -> None:
    LOG.warning(f"no Hadamard matrix of size {size} is known here: a random rotation takes its place")


def hadamard(size: int) -> Tensor | None:
    """Return a fp64 matrix of 1 and -1 with orthogonal rows, or None if doubling and Paley's construction give none.

    Sizes are 2^k, and 2^k (q + 1) for a prime q with q mod 4 = 3: 12 2^k, 20 2^k, 44 2^k, ...
    """
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    prime = size - 1
    if size % 4 == 0 and all(prime % factor for factor in range(2, int(prime**0.5) + 1)):
        return _paley(prime)
    half = hadamard(size // 2) if size % 2 == 0 else None
    return None if half is None else torch.cat((torch.cat((half, half), 1), torch.cat((half, -half), 1)))


def _paley(prime: int) -> Tensor:
    """Return I + S with S = [[0, 1], [-1, residues of i - j]], skew (Paley 1933)."""
    numbers = torch.arange(prime)
    residues = -torch.ones(prime, dtype=torch.float64)
    residues[numbers.square() % prime] = 1.0
    residues[0] = 0.0
    skew = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    skew[1:, 0] = -1.0
    skew[0, 0] = 0.0
    skew[1:, 1:] = residues[(numbers[:, None] - numbers) % prime]
    return skew + torch.eye(prime + 1, dtype=torch.float64)


def _untie(model: nn.Module) -> None:
    """Give the head its own matrix."""
    embedding, head = model.get_parameter("model.embed_tokens.weight"), model.get_submodule("lm_head")
    if head.weight is embedding:
        head.weight = nn.Parameter(embedding.detach().clone(), embedding.requires_grad)
    config = model.config
    if isinstance(model, CausalLM):
        model.config = model.config.model_copy(update={"tie_word_embeddings": False})
    else:
        config.tie_word_embeddings = False  # type: ignore[union-attr]


def _fold_gains(model: nn.Module) -> None:
    """Fold the gains of norms over the stream into the layers that read them. Single-scale gains may stay."""
    for block in decoder_blocks(model)[1]:
        parallel = getattr(block, "post_attention_layernorm", None) is None
        _fold_gain(block.get_submodule("input_layernorm"), _readers(block, attention=True, mlp=parallel))
        if not parallel:
            _fold_gain(block.get_submodule("post_attention_layernorm"), _readers(block, attention=False, mlp=True))
    _fold_gain(model.get_submodule("model.norm"), [model.get_submodule("lm_head")])


def _fold_gain(norm: nn.Module, readers: Iterable[nn.Module]) -> None:
    if isinstance(norm, (SingleScaleRMSNorm, nn.Identity)):
        return
    gain = norm.get_parameter("weight")
    for reader in readers:
        weight = reader.get_parameter("weight")
        _set(weight, weight.double() * gain.double())
    gain.fill_(1.0)


def _readers(block: nn.Module, attention: bool, mlp: bool) -> Iterator[nn.Linear]:
    """Yield the layers of the chosen branches that read the normed stream."""
    for name, module in block.named_modules():
        wanted = (attention and name.startswith("self_attn.")) or (mlp and name.startswith("mlp."))
        if wanted and name not in WRITERS and isinstance(module, nn.Linear):
            yield module


def _mixes_linearly(model: nn.Module) -> bool:
    """Return whether values are only summed over positions between v_proj and o_proj."""
    return not isinstance(model, CausalLM) or model.config.attention_gate != "elementwise"


def _head_size(model: nn.Module) -> int:
    config = model.config
    if isinstance(model, CausalLM):
        return model.config.head_dim
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)  # type: ignore[union-attr, operator]


def _turn_output(linear: nn.Linear, turn: Tensor) -> None:
    """Rotate a layer's output, in pieces of the size of the rotation."""
    size = len(turn)
    _set(linear.weight, (turn.T @ linear.weight.double().unflatten(0, (-1, size))).flatten(0, 1))
    if linear.bias is not None:
        _set(linear.bias, (linear.bias.double().unflatten(0, (-1, size)) @ turn).flatten())


def _linear(block: nn.Module, name: str) -> nn.Linear:
    module = block.get_submodule(name)
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{name} is no linear layer: the rotation has nowhere to go")
    return module


def _set(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.to(parameter.dtype))
