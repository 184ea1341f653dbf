"""Dynamic Context Pruning: votes, what they do to attention and to the loss, and a cache that forgets."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plumbline.model.attention.pruned import PrunedAttention, PrunedCache, SparseSigmoid, set_alpha
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.objectives.next_token import NextToken, NextTokenConfig

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., CausalLM]

SHAPE: dict[str, Any] = {"attention": "pruned", "pruning_rank": 8, "num_key_value_heads": 2}


def vote(score: Tensor, alpha: float) -> Tensor:
    result: Tensor = SparseSigmoid.apply(score, torch.tensor(alpha))  # type: ignore[no-untyped-call]
    return result


def tokens(length: int = 20) -> Tensor:
    return torch.randint(61, (2, length), generator=torch.Generator().manual_seed(1))


def pruning_layers(model: CausalLM) -> list[PrunedAttention]:
    return [module for module in model.modules() if isinstance(module, PrunedAttention)]


def test_the_sparse_sigmoid_is_the_sigmoid_at_1_and_a_ramp_at_2() -> None:
    score = torch.linspace(-4, 4, 81)
    torch.testing.assert_close(vote(score, 1.0), score.sigmoid(), atol=2e-3, rtol=0)
    torch.testing.assert_close(vote(score, 2.0), ((score + 1) / 2).clamp(0, 1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("alpha", [1.3, 2.0, 4.0, 8.0])
def test_a_vote_solves_its_equation_and_saturates_outside(alpha: float) -> None:
    score = torch.linspace(-1.5, 1.5, 61, dtype=torch.float64).float()
    p = vote(score, alpha)
    inside = (p > 0) & (p < 1)
    assert (p[score >= 1 / (alpha - 1)] == 1).all()
    assert (p[score <= -1 / (alpha - 1)] == 0).all()
    solved = p[inside].double()
    left = solved ** (alpha - 1) - (1 - solved) ** (alpha - 1)
    torch.testing.assert_close(left, (alpha - 1) * score[inside].double(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 3.0, 6.0])
def test_the_gradient_of_a_vote_is_its_slope(alpha: float) -> None:
    score = torch.tensor([-5.0, -0.11, 0.03, 0.07, 5.0], requires_grad=True)
    vote(score, alpha).sum().backward()
    step = 2e-3
    slope = (vote(score.detach() + step, alpha) - vote(score.detach() - step, alpha)) / (2 * step)
    assert score.grad is not None
    torch.testing.assert_close(score.grad, slope, atol=2e-3, rtol=2e-2)


def test_attention_is_weighted_by_what_all_votes_left(make_model: MakeModel) -> None:
    """Training, against the map written out: c(n, k) is the product of the votes of the tokens in between."""
    model = make_model(**SHAPE, dropout=0.0).train()
    set_alpha(model, 1.5)
    layer: Any = pruning_layers(model)[1]
    seen: list[Any] = []
    layer.register_forward_hook(lambda _m, inputs, output: seen.extend((*inputs[:2], output)))
    model(tokens())
    x, context, found = seen
    query, key = layer.queries_and_keys(x, context)
    score = torch.einsum("bqr,bkr->bqk", layer.ask_proj(x), layer.offer_proj(x)) / math.sqrt(8) + layer.keep_bias
    votes, length = vote(score, 1.5), x.size(1)
    kept = torch.zeros(2, length, length)
    for n in range(length):
        for k in range(n + 1):
            kept[:, n, k] = math.prod(votes[:, q, k] for q in range(k + 1, n + 1))
    logits = layer.scale * query @ key.repeat_interleave(2, dim=1).transpose(-1, -2)
    weights = logits.exp() * kept[:, None]
    weights = weights / weights.sum(-1, keepdim=True)
    mixed = weights @ layer.values(x).repeat_interleave(2, dim=1)
    torch.testing.assert_close(found, layer.o_proj(mixed.transpose(1, 2).flatten(2)), atol=1e-4, rtol=1e-3)
    share = kept.tril(-1).sum() / (2 * length * (length - 1) / 2)
    torch.testing.assert_close(layer.kept, share.detach(), atol=1e-5, rtol=1e-5)
    assert 0.05 < share < 0.95


def test_the_loss_pays_for_what_is_kept(make_model: MakeModel) -> None:
    model = make_model(**SHAPE).train()
    batch: dict[str, Any] = {
        "input_ids": tokens(),
        "labels": tokens().roll(-1, 1),
        "document_ids": None,
        "positions": None,
    }
    batch["labels"][:, -3:] = -100
    results = [NextToken(NextTokenConfig(pruning_weight=weight))(model, batch, 0) for weight in (0.0, 0.4)]
    shares = [layer.kept for layer in pruning_layers(model)]
    expected = 0.4 * 2 * 17 * torch.stack([share for share in shares if share is not None]).mean()
    torch.testing.assert_close(results[1][0][0] - results[0][0][0], expected, rtol=1e-4, atol=1e-4)
    assert results[1][1] == results[0][1]

    def votes_move(weight: float) -> float:
        model.zero_grad()
        losses, *_ = NextToken(NextTokenConfig(pruning_weight=weight))(model, batch, 0)
        losses.sum().backward()
        gradient = pruning_layers(model)[0].keep_bias.grad
        assert gradient is not None
        return gradient.item()

    assert votes_move(5.0) > votes_move(0.0), "a price on context lowers the bias towards keeping"


def test_the_price_does_not_depend_on_how_rows_are_cut_into_batches(make_model: MakeModel) -> None:
    """Rows with few labels and rows with many keep different shares of their context."""
    model = make_model(**SHAPE).train()
    ids, labels = tokens(), tokens().roll(-1, 1)
    ids[1, 1:] = ids[1, 0]
    labels[0, :-2] = -100

    def price(rows: slice) -> Tensor:
        priced, plain = (model(ids[rows], labels[rows], pruning_weight=weight)[0] for weight in (2.0, 0.0))
        return priced - plain  # type: ignore[no-any-return]

    parts = [price(slice(row, row + 1)) for row in range(2)]
    torch.testing.assert_close(price(slice(2)), parts[0] + parts[1], rtol=1e-4, atol=1e-4)
    assert abs(parts[1] / (labels[1] >= 0).sum() - parts[0] / 2) > 0.05, "they keep different shares"


def test_votes_sharpen_over_training() -> None:
    config = NextTokenConfig(pruning_steps=100)
    assert [config.pruning_alpha(step) for step in (0, 50, 100, 500)] == pytest.approx([1.0, 4.5, 8.0, 8.0])


@torch.no_grad()
def test_the_cache_forgets_what_was_dropped_and_frees_its_memory(make_model: MakeModel) -> None:
    model = make_model(**SHAPE)
    for layer in pruning_layers(model):
        layer.keep_bias.fill_(-0.6)  # drops most
    ids = tokens(40)
    whole, cache = model(ids), model.new_cache(2, 40)
    pieces = [model(piece, cache=cache) for piece in ids.split([10, *[1] * 30], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-4)
    for layer_cache in cache:
        assert isinstance(layer_cache, PrunedCache)
        assert layer_cache.length == 40
        alive = layer_cache.alive.sum(1).max().item()
        assert alive < 25
        slots = layer_cache.keys.size(2)
        assert slots == layer_cache.values.size(2) == layer_cache.offers.size(1) == layer_cache.alive.size(1)
        assert slots <= alive / 0.75 + 1
        assert layer_cache.keys.untyped_storage().nbytes() == layer_cache.keys.nbytes, "no larger buffer is kept alive"


@torch.no_grad()
def test_everything_is_kept_when_every_vote_says_so(make_model: MakeModel) -> None:
    """Then it is ordinary attention."""
    model = make_model(**SHAPE)
    plain = make_model(num_key_value_heads=2)
    plain.load_state_dict(model.state_dict(), strict=False)
    for layer in pruning_layers(model):
        layer.keep_bias.fill_(100.0)
    torch.testing.assert_close(model(tokens()), plain(tokens()), rtol=1e-4, atol=1e-4)
    assert [layer.kept for layer in pruning_layers(model)] == [1.0] * 3
