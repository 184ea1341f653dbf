"""Attention: against a naive one, with a cache, over packed documents, and never from the future."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plumbline.model.attention.context import attention_context
from plumbline.model.attention.softmax import SoftmaxAttention
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.multipliers import Multipliers

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., CausalLM]
Enliven = Callable[..., None]

SHAPES: list[dict[str, Any]] = [
    {"family": "qwen3"},
    {"family": "qwen3", "num_key_value_heads": 2, "head_dim": 6, "sliding_window": 4},
    {"family": "llama", "num_key_value_heads": 1, "sliding_window": 7, "attention_bias": True},
    {"family": "gpt2"},
    {"family": "gpt2", "sliding_window": 3, "num_key_value_heads": 2, "qk_norm": "head"},
]


def tokens(rows: int = 2, length: int = 21) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(1))


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head, as a complex product over (i, i + head_dim / 2)."""
    half = x.numel() // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag))


def naive(
    layer: SoftmaxAttention, config: ModelConfig, x: Tensor, positions: list[int], looks: Callable[..., bool]
) -> Tensor:
    """Attend in one sequence [T, D], query by query and head by head, in float64; `looks(i, j)` says what i may see."""
    heads = config.num_attention_heads
    group = heads // config.num_key_value_heads
    query = layer.q_norm(layer.q_proj(x).unflatten(-1, (-1, config.head_dim)))
    key = layer.k_norm(layer.k_proj(x).unflatten(-1, (-1, config.head_dim)))
    value = layer.v_proj(x).unflatten(-1, (-1, config.head_dim))
    rows = []
    for i in range(len(x)):
        seen = [j for j in range(len(x)) if looks(i, j)]
        mixed = []
        for head in range(heads):
            q, keys = query[i, head], key[seen, head // group]
            if config.position_embedding == "rope":
                q = turned(q, positions[i], config.rope_theta)
                keys = torch.stack(
                    [turned(k, positions[j], config.rope_theta) for k, j in zip(keys, seen, strict=True)]
                )
            mixed.append((layer.scale * keys @ q).softmax(0) @ value[seen, head // group])
        rows.append(layer.o_proj(torch.cat(mixed)))
    return torch.stack(rows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("documents", [None, [0] * 3 + [1] * 6 + [2] * 3])
def test_attention_is_the_naive_one(
    make_config: MakeConfig, enliven: Enliven, shape: dict[str, Any], documents: list[int] | None
) -> None:
    config = make_config(**shape)
    layer = SoftmaxAttention(config, Multipliers(attention=0.3), layer=0)
    enliven(layer)
    layer = layer.double()
    length = 12
    x = torch.randn(1, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = list(range(length)) if documents is None else [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    ids = None if documents is None else torch.tensor([documents])
    window = config.sliding_window or length

    def looks(i: int, j: int) -> bool:
        return j <= i and i - j < window and (documents is None or documents[i] == documents[j])

    context = attention_context(config, torch.tensor([positions]), 0, ids, torch.float64)
    found = layer(x, context)[0]
    # Our rotary tables are fp32 on purpose
    torch.testing.assert_close(found, naive(layer, config, x[0], positions, looks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunks", [(21,), (1,) * 21, (8, *(1,) * 13), (5, 3, 13), (1, 2, 4, 8, 6)])
@torch.no_grad()
def test_a_cache_gives_the_logits_of_the_full_forward(
    make_model: MakeModel, shape: dict[str, Any], chunks: tuple[int, ...]
) -> None:
    model = make_model(**shape)
    cache = model.new_cache(batch=2, capacity=24)
    parts = [model(part, cache=cache) for part in tokens().split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens()), rtol=1e-4, atol=1e-5)
    assert {layer.length for layer in cache} == {21}


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_packed_documents_are_documents_alone(make_model: MakeModel, shape: dict[str, Any]) -> None:
    model = make_model(**shape, document_mask=True)
    packings = ([6, 1, 14], [9, 12])  # documents of the two rows
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in packings])
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in packings])
    packed = model(tokens(), document_ids=ids, positions=positions)
    for row, lengths in enumerate(packings):
        alone = [model(document[None])[0] for document in tokens()[row].split(lengths)]
        torch.testing.assert_close(packed[row], torch.cat(alone), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_documents_matter_only_when_they_are_masked(make_model: MakeModel) -> None:
    model = make_model(document_mask=False)
    ids, positions = torch.tensor([[0] * 9 + [1] * 12] * 2), torch.tensor([[*range(9), *range(12)]] * 2)
    assert torch.equal(model(tokens(), document_ids=ids, positions=positions), model(tokens()))


@pytest.mark.parametrize("shape", [*SHAPES, {"mlp": "relu2", "norm": "layernorm"}])
@torch.no_grad()
def test_a_token_changes_nothing_before_it(make_model: MakeModel, shape: dict[str, Any]) -> None:
    model = make_model(**shape)
    before = model(tokens())
    for position in (0, 7, 20):
        changed = tokens()
        changed[:, position] = (changed[:, position] + 1) % 61
        difference = (model(changed) - before).abs().amax(-1)
        assert (difference[:, :position] == 0).all()
        assert (difference[:, position] > 1e-3).all()
        if position < 20:
            assert (difference[:, position + 1] > 1e-5).all()


@torch.no_grad()
def test_a_window_reaches_one_layer_further_with_each_layer(make_model: MakeModel) -> None:
    model = make_model(sliding_window=3, num_hidden_layers=2)
    changed = tokens()
    changed[:, 5] = (changed[:, 5] + 1) % 61
    moved = ((model(changed) - model(tokens())).abs().amax(-1) > 0).any(0)
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8, 9]  # 2 tokens in each of 2 layers


def test_dropout_acts_in_training_only(make_model: MakeModel) -> None:
    noisy, quiet = make_model(dropout=0.2), make_model()
    assert torch.equal(noisy(tokens()), quiet(tokens()))
    noisy.train()
    assert not torch.equal(noisy(tokens()), noisy(tokens()))
    assert torch.equal(quiet.train()(tokens()), quiet.eval()(tokens()))


@pytest.mark.parametrize(
    ("place", "closed"),
    [("embedding", ("o_proj", "down_proj")), ("attention branch", ("down_proj",)), ("MLP branch", ("o_proj",))],
)
def test_dropout_acts_on_the_embedding_and_on_both_branches(
    make_model: MakeModel, place: str, closed: tuple[str, ...]
) -> None:
    model = make_model(dropout=0.3, num_hidden_layers=1).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(projection in name for projection in closed):
                parameter.zero_()
    streams: list[Tensor] = []
    model.model.layers[0].register_forward_hook(lambda _m, inputs, output: streams.extend((inputs[0], output)))
    torch.manual_seed(0)
    model(tokens())
    entering, leaving = streams
    dropped = (entering if place == "embedding" else leaving - entering) == 0
    assert 0.25 < dropped.float().mean().item() < 0.35


@torch.no_grad()
def test_dropout_acts_on_attention_weights(make_config: MakeConfig, enliven: Enliven) -> None:
    config = make_config(dropout=0.3)
    layer = SoftmaxAttention(config, Multipliers(attention=0.3), layer=0)
    enliven(layer)
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    context = attention_context(config, torch.arange(6)[None], 0, None, torch.float32)
    torch.manual_seed(0)
    noisy = layer.train()(x.expand(2000, -1, -1), context)
    expected = layer.eval()(x, context)[0]
    assert (noisy.std(0) > 0.1).all()
    assert ((noisy.mean(0) - expected).abs() < 5 * noisy.std(0) / 2000**0.5).all()
