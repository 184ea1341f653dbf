"""Diagnostics are what their definitions say, for activations that a model really has, and looking changes nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from plumbline.model.attention.context import AttentionContext, attention_context
from plumbline.model.diagnostics import observer
from plumbline.model.diagnostics.observer import Observation, layer_name, observing
from plumbline.model.diagnostics.statistics import (
    Statistics,
    attention_statistics,
    attention_sums,
    gain_statistics,
    gain_sums,
    gemm_statistics,
    gemm_sums,
    gradient_statistics,
    gradient_sums,
    stream_statistics,
    stream_sums,
    update_statistics,
    update_sums,
)
from plumbline.model.rotary import apply_rotary

if TYPE_CHECKING:
    from collections.abc import Callable

    from plumbline.model.decoder import CausalLM
    from tests.model.conftest import MakeModel


def activations(*shape: int, seed: int = 0) -> Tensor:
    """Return tokens that have something in common, and channels of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + 0.7 * torch.randn(shape[-1], generator=generator)
    return x * torch.linspace(0.2, 3.0, shape[-1]).exp()


def brute_stream(x: Tensor) -> Statistics:
    """Compute the definitions, one by one."""
    x = x.double()
    sequences, length, width = x.shape
    flat = x.flatten(0, 1)
    neuron_rms = torch.tensor([math.sqrt(float(flat[:, j].square().mean())) for j in range(width)])
    rms = float(flat.square().mean().sqrt())
    ratios = [float(token.abs().max() / token.abs().sort().values[(width - 1) // 2]) for token in flat]
    off_diagonal, ranks, residue = [], [], 0.0
    for sequence in x / rms:
        gram = sequence @ sequence.T / width
        off_diagonal += [float(gram[a, b]) for a in range(length) for b in range(length) if a != b]
        singular = torch.linalg.svdvals(sequence)
        ranks.append(float(singular.square().sum() / singular[0] ** 2))
        residue += float((sequence - sequence.mean(0)).square().sum())
    return {
        "rms": rms,
        "kurt": float((neuron_rms**4).mean() / (neuron_rms**2).mean() ** 2),
        "mmr": sum(ratios) / len(ratios),
        "corr_mean": sum(off_diagonal) / len(off_diagonal),
        "corr_rms": math.sqrt(sum(entry**2 for entry in off_diagonal) / len(off_diagonal)),
        "rank1_resid": math.sqrt(residue / (sequences * length * width)),
        "stable_rank": sum(ranks) / len(ranks),
    }


@pytest.mark.parametrize("shape", [(3, 5, 9), (2, 12, 6)])
def test_stream_statistics_are_their_definitions(shape: tuple[int, int, int]) -> None:
    """More channels than tokens, and fewer."""
    x = activations(*shape)
    assert stream_statistics(stream_sums(x)) == pytest.approx(brute_stream(x), rel=1e-4)


def test_extremes_of_the_stream() -> None:
    """All tokens alike: rank collapse. One channel alone: the largest kurtosis there is."""
    alike = stream_statistics(stream_sums(activations(1, 1, 8).expand(2, 6, 8)))
    assert alike["corr_mean"] == pytest.approx(1)
    assert alike["corr_rms"] == pytest.approx(1)
    assert alike["rank1_resid"] == pytest.approx(0, abs=1e-3)
    assert alike["stable_rank"] == pytest.approx(1)
    assert stream_statistics(stream_sums(torch.eye(8)[:1].expand(1, 4, 8)))["kurt"] == pytest.approx(8)
    assert stream_statistics(stream_sums(torch.eye(8)[None]))["stable_rank"] == pytest.approx(8)


def test_what_is_nothing_counts_as_nothing() -> None:
    """A token of zeros has a ratio of 0, and sequences of one token have no pairs that could be alike."""
    x = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 10.0]]])
    assert stream_statistics(stream_sums(x))["mmr"] == pytest.approx((0 + 2 + 5) / 3)
    alone = stream_statistics(stream_sums(activations(4, 1, 8)))
    assert (alone["corr_mean"], alone["corr_rms"]) == pytest.approx((0, 0), abs=1e-5)


def test_sequences_do_not_mix() -> None:
    """Two rows of tokens that are each alike and unlike each other's: fully correlated all the same."""
    x = torch.stack((torch.eye(4)[:1].expand(3, 4), torch.eye(4)[1:2].expand(3, 4)))
    assert stream_statistics(stream_sums(x))["corr_mean"] == pytest.approx(1)


def test_sums_of_parts_make_the_statistic_of_the_whole() -> None:
    x = activations(4, 6, 8)
    x[2:, :, -1] *= 20  # an outlier channel in the second half only
    halves = [stream_sums(part) for part in x.split(2)]
    together = stream_statistics({name: halves[0][name] + halves[1][name] for name in halves[0]})
    assert together == pytest.approx(stream_statistics(stream_sums(x)), rel=1e-6)
    mean = sum(stream_statistics(half)["kurt"] for half in halves) / 2
    assert abs(mean / together["kurt"] - 1) > 0.1, "the mean of the halves' kurtoses is another number"


def test_kurtosis_ahead_of_a_product() -> None:
    x = activations(2, 5, 7)
    tokens = [float((t**4).mean() / (t**2).mean() ** 2) for t in x.flatten(0, 1)]
    assert gemm_statistics(gemm_sums(x))["kurt"] == pytest.approx(sum(tokens) / len(tokens), rel=1e-5)
    assert gemm_statistics(gemm_sums(torch.zeros(2, 3)))["kurt"] == 0


@pytest.mark.parametrize("masked", ["causal", "documents", "window", "added", "capped"])
@pytest.mark.parametrize("stride", [1, 3])
def test_attention_statistics_are_their_definitions(masked: str, stride: int) -> None:
    """Four query heads over two key heads; the second document starts at 4; a window of 3."""
    length, scale = 9, 0.7
    query, key = activations(2, 4, length, 6) / 9, activations(2, 2, length, 6, seed=1) / 9
    place = torch.arange(length)
    allowed = place[None] <= place[:, None]
    if masked == "documents":
        allowed &= (place[None] >= 4) == (place[:, None] >= 4)
    if masked == "window":
        allowed &= place[:, None] - place[None] < 3
    mask: Tensor | None = None if masked == "causal" else allowed[None, None]
    if masked == "added":
        mask = torch.zeros(length, length).masked_fill(~allowed, -math.inf)[None, None]
    cap, learned = (2.0, torch.tensor([0.0, 1.0, -1.0, 3.0])) if masked == "capped" else (None, None)
    sums = attention_sums(query, key, mask, masked == "causal", scale, stride, cap, learned)

    entropies: dict[int, list[float]] = {head: [] for head in range(4)}
    sinks: dict[int, list[float]] = {head: [] for head in range(4)}
    largest = -math.inf
    for row in range(2):
        for head in range(4):
            for i in range(stride - 1, length, stride):
                keys = [j for j in range(length) if allowed[i, j]]
                logits = torch.stack([query[row, head, i] @ key[row, head // 2, j] * scale for j in keys]).double()
                if cap is not None and learned is not None:
                    logits = torch.cat((cap * torch.tanh(logits / cap), learned[head : head + 1]))
                largest = max(largest, float(logits.max()))
                if len(logits) > 1:
                    weights = logits.softmax(0)
                    entropies[head].append(float(-(weights * weights.log()).sum()) / math.log(len(logits)))
                    if keys[0] == 0:
                        sinks[head].append(float(weights[0]))
    entropy = [sum(values) / len(values) for values in entropies.values()]
    sink = [sum(values) / max(1, len(values)) for values in sinks.values()]
    expected = {
        "entropy": sum(entropy) / 4,
        "entropy_min": min(entropy),
        "sink": sum(sink) / 4,
        "sink_max": max(sink),
        "max_logit": largest,
    }
    assert attention_statistics(sums) == pytest.approx(expected, rel=1e-5)


def test_updates_gains_and_gradients() -> None:
    weight, change = activations(4, 5), 0.01 * activations(4, 5, seed=2)
    update = update_statistics(update_sums(weight, weight + change))
    assert update["rms"] == pytest.approx(float(change.norm() / weight.norm()), rel=1e-4)
    parts = [torch.tensor([0.5, -2.0]), torch.empty(0), torch.tensor([4.0])]
    observation = Observation()
    for part in parts:
        observation.add("gain", "q_norm/00", gain_sums(part))
    found = observation.record()
    assert found == pytest.approx(
        {f"gain/{name}_q_norm/00": v for name, v in (("mean", 2.5 / 3), ("min", -2.0), ("max", 4.0))}
    )
    assert gain_statistics(gain_sums(torch.tensor([3.0]))) == {"mean": 3.0, "min": 3.0, "max": 3.0}
    ratios = gradient_statistics(gradient_sums(torch.full((2, 2), 3.0), torch.full((1, 2), 1.0), torch.ones(2, 2)))
    assert ratios == pytest.approx({"ratio_q_v": 3.0, "ratio_k_v": math.sqrt(0.5)})


def tokens_of(model: CausalLM, rows: int = 3, length: int = 12) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))


def observe(model: CausalLM, tokens: Tensor, stride: int = 1) -> Statistics:
    with observing(model, stride) as observation:
        model(tokens)
    return observation.record()


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_the_observer_measures_what_it_says(
    make_model: MakeModel, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a forward by hand, block by block."""
    monkeypatch.setattr(observer, "LOGITS_AT_ONCE", 300)  # several chunks
    model = make_model(family=family)
    tokens = tokens_of(model)
    found = observe(model, tokens)
    layers: Any = model.model.layers
    with torch.no_grad():
        stream = model.model.embed_tokens(tokens)
        assert found["emb/rms"] == pytest.approx(rms(stream))
        positions = torch.arange(tokens.size(1))[None]
        if model.model.embed_positions is not None:
            stream = stream + model.model.embed_positions(positions)
        stream = stream * model.multipliers.embedding
        context = attention_context(model.config, positions, 0, None, stream.dtype)
        for number, layer in enumerate(layers):
            place = f"{number:02d}"
            assert_stream(found, place, stream)
            normed = layer.input_layernorm(stream)
            added = model.multipliers.residual * layer.self_attn(normed, context)
            assert found[f"branch/ratio_attn/{place}"] == pytest.approx(rms(added) / rms(stream), rel=1e-3)
            assert found[f"gemm_in/kurt_qkv/{place}"] == pytest.approx(kurtosis(normed), rel=1e-4)
            assert found[f"attn/max_logit/{place}"] == pytest.approx(
                largest_logit(layer.self_attn, normed, context), rel=1e-4
            )
            query, key = queries_and_keys(layer.self_attn, normed, context)
            joined = {"q": query.transpose(1, 2).flatten(2), "k": key.transpose(1, 2).flatten(2)}
            joined["v"] = layer.self_attn.v_proj(normed)
            for name, channels in joined.items():
                assert found[f"attn_in/kurt_{name}/{place}"] == pytest.approx(kurtosis(channels), rel=1e-4)
            between = stream + added
            stream = layer(stream, context)
            assert found[f"branch/ratio_mlp/{place}"] == pytest.approx(rms(stream - between) / rms(between), rel=1e-3)
            assert found[f"gemm_in/kurt_block/{place}"] == pytest.approx(kurtosis(stream), rel=1e-4)
        assert_stream(found, "head", stream)
        logits: Any = model(tokens)
    assert found["logits/z"] == pytest.approx(float(logits.logsumexp(-1).square().mean()), rel=1e-5)
    assert found["logits/max"] == pytest.approx(float(logits.max()))
    assert found["head/rms"] == pytest.approx(rms(logits), rel=1e-5)
    assert found["gemm_in/kurt_mlp2/02"] > 1


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def kurtosis(x: Tensor) -> float:
    return gemm_statistics(gemm_sums(x))["kurt"]


def assert_stream(found: Statistics, place: str, stream: Tensor) -> None:
    for name, value in brute_stream(stream).items():
        assert found[f"stream/{name}/{place}"] == pytest.approx(value, rel=1e-3), name


def queries_and_keys(attention: Any, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
    query, key = (
        norm(projection(x).unflatten(-1, (-1, attention.head_dim))).transpose(1, 2)
        for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj))
    )
    if context.rotary is not None:
        query, key = apply_rotary(query, *context.rotary), apply_rotary(key, *context.rotary)
    return query, key


def largest_logit(attention: Any, x: Tensor, context: AttentionContext) -> float:
    query, key = queries_and_keys(attention, x, context)
    logits = query @ key.repeat_interleave(query.size(1) // key.size(1), 1).mT * attention.scale
    return float(logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -math.inf).max())


@pytest.mark.parametrize(
    "shape",
    [
        {"family": "fog"},
        {"family": "outlier_protected", "branch_gain": "vector"},
        {"block": "sandwich_norm", "skip_gain": 0.5},
        {"family": "shaped"},
        {"parallel": True},
        {"family": "sas"},
        {"family": "mixit"},
        {"attention": "pruned"},
        {"attention_sink": True},
    ],
)
def test_branches_of_every_block_are_what_arrives_in_the_stream(make_model: MakeModel, shape: dict[str, Any]) -> None:
    model = make_model(**shape)
    tokens, block = tokens_of(model), model.model.layers[1]
    stream: list[Tensor] = []
    joins = block.get_submodule("self_attn" if shape.get("family") == "sas" else "attn_residual")
    hooks = [
        block.register_forward_pre_hook(lambda _m, x: stream.append(x[0])),
        joins.register_forward_hook(lambda _m, _x, y: stream.append(y)),
        block.register_forward_hook(lambda _m, _x, y: stream.append(y)),
    ]
    found = observe(model, tokens)
    for hook in hooks:
        hook.remove()
    before, between, after = stream
    skip = model.multipliers.skip
    assert (skip != 1.0) is ("skip_gain" in shape or shape.get("family") == "shaped")
    attention = between - before * (0.0 if shape.get("family") == "sas" else skip)
    assert found["branch/ratio_attn/01"] == pytest.approx(rms(attention) / rms(before), rel=1e-4)
    assert found["branch/ratio_mlp/01"] == pytest.approx(rms(after - skip * between) / rms(between), rel=1e-4)
    assert ("attn/entropy/01" in found) is (shape.get("family") != "mixit")
    assert "gemm_in/kurt_qkv/01" in found
    assert ("attn_in/kurt_v/01" in found) is ("attn/entropy/01" in found)


@pytest.mark.parametrize("sink", [False, True])
def test_a_growing_gain_of_the_queries_shows(make_model: MakeModel, sink: bool) -> None:
    """As in arXiv 2505.20524, whose runs failed by it; with a sink, attention is written out."""
    model = make_model(attention_sink=sink)
    tokens, gain = tokens_of(model), model.get_parameter("model.layers.1.self_attn.q_norm.weight")
    before = observe(model, tokens)
    with torch.no_grad():
        gain[3] *= 40
    after = observe(model, tokens)
    assert after["attn_in/kurt_q/01"] > 2 * before["attn_in/kurt_q/01"]
    for key in ("gemm_in/kurt_qkv/01", "attn_in/kurt_k/01", "attn_in/kurt_v/01"):
        assert after[key] == before[key], key


def test_the_mask_is_the_one_that_attention_has(make_model: MakeModel) -> None:
    """Documents of one token leave no choice at all; those of two leave one key beside the query."""
    model = make_model(document_mask=True)
    tokens = tokens_of(model)
    for size, expected in ((1, 0.0), (6, None)):
        documents = (torch.arange(12) // size).expand(3, 12)
        with observing(model, 1) as observation:
            model(tokens, document_ids=documents, positions=(torch.arange(12) % size).expand(3, 12))
        found = observation.record()["attn/entropy/00"]
        assert found == expected if expected is not None else 0 < found < 1


@pytest.mark.parametrize("shape", [{}, {"attention_sink": True}, {"family": "fog"}])
def test_padding_counts_for_nothing(make_model: MakeModel, shape: dict[str, Any]) -> None:
    """Rows of several lengths have the sums that each has alone, without its padding."""
    model = make_model(**shape)
    tokens = tokens_of(model)
    lengths = torch.tensor([12, 5, 8])
    real = torch.arange(12) < lengths[:, None]
    tokens[~real] = 0
    with observing(model, 2, real) as padded:
        model(tokens)
    alone = Observation()
    for row, length in zip(tokens, lengths, strict=True):
        with observing(model, 2) as observation:
            model(row[None, :length])
        for (kind, rest), sums in observation.sums.items():
            alone.add(kind, rest, sums)
    expected = alone.record()
    assert padded.record() == pytest.approx(expected, rel=1e-4)
    assert observe(model, tokens, 2)["stream/corr_mean/head"] != pytest.approx(
        expected["stream/corr_mean/head"], rel=1e-2
    )


def test_where_nothing_is_padding_no_bit_changes(make_model: MakeModel) -> None:
    model = make_model()
    tokens = tokens_of(model)
    with observing(model, 1, torch.ones_like(tokens, dtype=torch.bool)) as observation:
        model(tokens)
    assert observation.record() == observe(model, tokens)


def test_looking_leaves_no_trace(make_model: MakeModel) -> None:
    model = make_model()
    tokens = tokens_of(model)
    with torch.no_grad():
        before: Any = model(tokens)
        observe(model, tokens)
        assert torch.equal(model(tokens), before)
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not hooks
    assert torch.get_rng_state().equal(_state_after(lambda: observe(model, tokens)))


def _state_after(action: Callable[[], object]) -> Tensor:
    action()
    return torch.get_rng_state()


def test_compiled_blocks_are_observed_and_not_compiled_again(make_model: MakeModel) -> None:
    compilations = 0

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal compilations
        compilations += 1
        return graph.forward

    model = make_model()
    tokens = tokens_of(model)
    expected = observe(model, tokens)
    for layer in model.model.layers:
        layer.compile(backend=count)
    with torch.no_grad():
        before: Any = model(tokens)
        once = compilations
        assert once > 0
        assert observe(model, tokens) == pytest.approx(expected, rel=1e-5)
        assert torch.equal(model(tokens), before)
    assert compilations == once


def test_block_numbers_sort_by_depth() -> None:
    assert [layer_name(number, 4) for number in (0, 3)] == ["00", "03"]
    assert [layer_name(number, 101) for number in (7, 100)] == ["007", "100"]
