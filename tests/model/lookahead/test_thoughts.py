"""Latent lookahead in parallel against what it means: each thought alone, the whole expanded sequence run anew."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plumbline.model.decoder import CausalLM
from plumbline.model.lookahead import masks
from plumbline.model.lookahead.anchors import Anchors
from plumbline.model.lookahead.masks import Text
from plumbline.model.lookahead.thoughts import Thinker, ThoughtSettings, run_text, run_text_with_thoughts
from plumbline.model.recomputation import Recomputed, recompute
from tests.model.conftest import MakeModel

LENGTH, HORIZON = 11, 3
GROW = ThoughtSettings(HORIZON, "grow", passes=1, bidirectional=True)
SETTINGS = {
    "grow": GROW,
    "append": replace(GROW, bidirectional=False),
    "fixed": replace(GROW, growth="fixed", passes=2),
    "fixed causal": replace(GROW, growth="fixed", passes=3, bidirectional=False),
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gpt2": {"family": "gpt2"},
    "window": {"sliding_window": 4},
    "documents": {"document_mask": True},
    "value residual": {"value_residual": True},
    "outlier protected": {"family": "outlier_protected"},
    "sinks": {"attention_sink": True, "embedding_projection": True},
    "olmo2": {"family": "olmo2"},
    "fog": {"family": "fog"},
    "sandwich, capped": {"block": "sandwich_norm", "attn_logit_softcapping": 2.0},
    "parallel, gated": {"parallel": True, "attention_gate": "elementwise"},
    "documents, window": {"document_mask": True, "sliding_window": 3},
}
ANCHORS = torch.tensor([[2, 5, 8], [0, 4, 6]])
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])


def thinking_model(make_model: MakeModel, settings: ThoughtSettings, **shape: Any) -> tuple[CausalLM, Thinker]:
    model = make_model(**shape).double()
    thinker = Thinker(settings, model.config.hidden_size).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in thinker.parameters():
            parameter.normal_(generator=generator)
        gain_of(thinker).fill_(30.0)
    return model, thinker


def gain_of(thinker: Thinker) -> Tensor:
    assert thinker.gain is not None
    return thinker.gain


def text_of(model: CausalLM) -> Text:
    masked = model.config.document_mask
    places = torch.arange(LENGTH).expand(2, -1)
    begins = torch.stack([(DOCUMENTS[row][:, None] == DOCUMENTS[row]).int().argmax(0) for row in range(2)])
    return Text(places - begins if masked else places, DOCUMENTS if masked else None)


def tokens_of(model: CausalLM) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def think(model: CausalLM, thinker: Thinker, tokens: Tensor, anchors: Tensor = ANCHORS) -> Tensor:
    text = text_of(model)
    states, memory = run_text(model.model, tokens, text)
    thoughts, _ = thinker(
        model.model, states, memory, text, Anchors(anchors, torch.ones_like(anchors, dtype=torch.bool))
    )
    return thoughts  # type: ignore[no-any-return]


def alone(model: CausalLM, thinker: Thinker, tokens: Tensor, row: int, anchor: int) -> Tensor:
    """Return one thought [tau, D], every pass over text and slots as one sequence, nothing remembered."""
    decoder, settings, text = model.model, thinker.settings, text_of(model)
    positions, documents = text.positions[row], DOCUMENTS[row]
    begin = int((documents == documents[anchor]).int().argmax()) if model.config.document_mask else 0
    prefix = slice(begin, anchor + 1)
    visible = decoder.embed(tokens[row : row + 1, prefix], positions[None, prefix])
    size = visible.size(1)

    def run(slots: Tensor) -> Tensor:
        """Return the final states of text and slots, [1, s, D] -> [1, size + s, D]."""
        count = slots.size(1)
        places = torch.cat((positions[prefix], positions[anchor] + torch.arange(count)))[None]
        places = places.clamp_max(model.config.max_position_embeddings - 1)
        if decoder.embed_positions is not None:
            slots = slots + decoder.embed_positions(places[:, size:]) * decoder.embedding_multiplier
        x = torch.cat((visible, slots), dim=1)
        order = torch.arange(size + count)
        seen = order <= order[:, None]
        if settings.bidirectional:
            seen[size:, size:] = True
        if decoder.config.sliding_window is not None:
            seen = seen & (places[0][:, None] - places[0] < decoder.config.sliding_window)
        context = replace(decoder.context(x, places), mask=seen[None, None])
        for layer in decoder.layers:
            x = layer(x, context)
        return decoder.finish(x)

    def feed(state: Tensor) -> Tensor:
        if not decoder.config.final_norm:
            state = state / (state.square().mean(-1, keepdim=True) + torch.finfo(state.dtype).eps).sqrt()
        return (
            state * decoder.config.initializer_range * gain_of(thinker) + thinker.role
        ) * decoder.embedding_multiplier

    start = feed(run(visible[:, :0])[:, -1:])
    if settings.growth == "grow":
        inputs = start
        for number in range(1, settings.horizon):
            inputs = torch.cat((inputs, feed(run(inputs)[:, size + number - 1 :])), dim=1)
        return run(inputs)[0, size:]
    assert thinker.waiting is not None
    inputs = torch.cat((start, (thinker.waiting + thinker.role)[None] * decoder.embedding_multiplier), dim=1)
    for _ in range(settings.passes - 1):
        inputs = torch.cat((start, feed(run(inputs)[:, size:-1])), dim=1)
    return run(inputs)[0, size:]


@pytest.mark.parametrize("settings", SETTINGS)
def test_gradients_are_those_of_each_alone(make_model: MakeModel, settings: str) -> None:
    model, thinker = thinking_model(make_model, SETTINGS[settings])
    tokens = tokens_of(model)
    weights = torch.randn(2, 3, HORIZON, model.config.hidden_size, generator=torch.Generator().manual_seed(9)).double()
    parameters = [*model.model.parameters(), *thinker.parameters()]
    together = torch.autograd.grad((think(model, thinker, tokens) * weights).sum(), parameters)
    one_by_one = sum(
        (alone(model, thinker, tokens, row, int(ANCHORS[row, number])) * weights[row, number]).sum()
        for row in range(2)
        for number in range(3)
    )
    for found, expected in zip(together, torch.autograd.grad(one_by_one, parameters), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("recomputed", ["full", "selective", 2])
def test_checkpointing_changes_no_gradient(make_model: MakeModel, settings: str, recomputed: Recomputed) -> None:
    model, thinker = thinking_model(make_model, SETTINGS[settings])
    model.train()
    gradients = []
    for each in ("none", recomputed):
        recompute(list(model.model.layers), each)  # type: ignore[arg-type]
        loss = think(model, thinker, tokens_of(model)).square().mean()
        gradients.append(torch.autograd.grad(loss, [*model.model.parameters(), *thinker.parameters()]))
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


@torch.no_grad()
def test_a_thought_depends_on_its_own_past_alone(make_model: MakeModel) -> None:
    model, thinker = thinking_model(make_model, GROW, document_mask=True)
    tokens = tokens_of(model)
    before = think(model, thinker, tokens)

    def changed(row: int, place: int) -> list[bool]:
        other = tokens.clone()
        other[row, place] = (other[row, place] + 1) % model.config.vocab_size
        return [
            not torch.equal(one, two) for one, two in zip(think(model, thinker, other)[row], before[row], strict=True)
        ]

    assert changed(0, 10) == [False, False, False], "behind all anchors"
    assert changed(0, 7) == [False, False, True]
    assert changed(0, 5) == [False, True, True], "the anchor itself"
    assert changed(0, 1) == [True, False, False], "another document begins at 4"
    assert changed(1, 1) == [False, True, True]
    moved = ANCHORS.clone()
    moved[0, 0] = 3
    assert torch.equal(think(model, thinker, tokens, moved)[0, 1:], before[0, 1:]), "thoughts do not see each other"


@torch.no_grad()
def test_documents_packed_into_a_row_think_as_alone(make_model: MakeModel) -> None:
    model, thinker = thinking_model(make_model, GROW, document_mask=True)
    tokens = tokens_of(model)
    second = tokens[:1, 4:]
    places = torch.arange(7)[None]
    text = Text(places, torch.zeros_like(places))
    states, memory = run_text(model.model, second, text)
    anchors = Anchors(torch.tensor([[1, 4]]), torch.ones(1, 2, dtype=torch.bool))
    found, _ = thinker(model.model, states, memory, text, anchors)
    torch.testing.assert_close(found[0], think(model, thinker, tokens)[0, 1:], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_the_text_pass_is_the_plain_model(make_model: MakeModel) -> None:
    for shape in SHAPES.values():
        model = make_model(**shape)
        tokens, text = tokens_of(model), text_of(model)
        states, _ = run_text(model.model, tokens, text)
        assert torch.equal(states, model.model(tokens, DOCUMENTS, text.positions))


def committed(
    model: CausalLM, thinker: Thinker, tokens: Tensor, anchors: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return states of the second text pass [B, T, D], and of all slots [B, K, tau, D]."""
    valid = torch.ones_like(anchors, dtype=torch.bool) if valid is None else valid
    text, chosen = text_of(model), Anchors(anchors, valid)
    states, memory = run_text(model.model, tokens, text)
    thoughts, thought_memory = thinker(model.model, states, memory, text, chosen)
    return run_text_with_thoughts(model.model, tokens, text, chosen, thought_memory, HORIZON), thoughts


@pytest.mark.parametrize("shape", ["qwen3", "gpt2", "window", "value residual"])
@torch.no_grad()
def test_one_committed_thought_is_the_papers_sequence(make_model: MakeModel, shape: str) -> None:
    """Text, the slots behind their anchor, more text: one sequence under the mask of arXiv 2603.20219."""
    model, thinker = thinking_model(make_model, GROW, **SHAPES[shape])
    decoder, tokens, anchor, text = model.model, tokens_of(model), 4, text_of(model)
    found, thoughts = committed(model, thinker, tokens, torch.tensor([[anchor]] * 2))
    states, _ = run_text(decoder, tokens, text)
    newest = [states[:, anchor]]  # what each pass ended in becomes the next slot's input
    for horizon in range(1, HORIZON):
        shorter = Thinker(replace(GROW, horizon=horizon), model.config.hidden_size).double()
        shorter.load_state_dict(thinker.state_dict())
        newest.append(think(model, shorter, tokens, torch.tensor([[anchor]] * 2))[:, 0, -1])
    fed = torch.stack(newest, dim=1)
    slots = (fed * decoder.config.initializer_range * gain_of(thinker) + thinker.role) * decoder.embedding_multiplier
    where = torch.arange(anchor, anchor + HORIZON).expand(2, -1)
    if decoder.embed_positions is not None:
        slots = slots + decoder.embed_positions(where) * decoder.embedding_multiplier
    places = torch.arange(LENGTH).expand(2, -1)
    x = decoder.embed(tokens, places)
    x = torch.cat((x[:, : anchor + 1], slots, x[:, anchor + 1 :]), dim=1)
    positions = torch.cat((places[:, : anchor + 1], where, places[:, anchor + 1 :]), dim=1)
    order = torch.arange(LENGTH + HORIZON)
    seen = order <= order[:, None]
    thought = slice(anchor + 1, anchor + 1 + HORIZON)
    seen[thought, thought] = True
    if decoder.config.sliding_window is not None:
        seen = seen & (positions[0][:, None] - positions[0] < decoder.config.sliding_window)
    context = replace(decoder.context(x, positions), mask=seen[None, None])
    for layer in decoder.layers:
        x = layer(x, context)
    expected = decoder.finish(x)
    torch.testing.assert_close(thoughts[:, 0], expected[:, thought], rtol=1e-9, atol=1e-9)
    is_text = (order < thought.start) | (order >= thought.stop)
    torch.testing.assert_close(found, expected[:, is_text], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found[:, anchor + 1 :], states[:, anchor + 1 :])


@torch.no_grad()
def test_text_does_not_see_a_thought_that_is_not_there(make_model: MakeModel) -> None:
    model, thinker = thinking_model(make_model, GROW)
    tokens, absent = tokens_of(model), torch.tensor([[4, 0], [7, 0]])
    found, _ = committed(model, thinker, tokens, absent, torch.tensor([[True, False]] * 2))
    expected, _ = committed(model, thinker, tokens, absent[:, :1])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("settings", "shape"),  # every pattern of thoughts, and every pattern of text, once: they meet in one conjunction
    [("grow", "documents"), ("append", "window"), ("fixed", "qwen3"), ("fixed causal", "documents")],
)
def test_masks_in_blocks_are_the_dense_ones(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, settings: str, shape: str
) -> None:
    """What FlexAttention evaluates on a GPU, here without its compiled kernel, committed thoughts included."""
    model, thinker = thinking_model(make_model, SETTINGS[settings], num_key_value_heads=1, **SHAPES[shape])
    tokens = tokens_of(model)
    dense = committed(model, thinker, tokens, ANCHORS)
    monkeypatch.setattr(masks, "dense_mask", masks.block_mask)
    for found, expected in zip(committed(model, thinker, tokens, ANCHORS), dense, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("settings", "passes"), [("grow", 4), ("fixed", 2)])
def test_compiled_blocks_take_masks_in_blocks_in_one_graph_a_pass(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, settings: str, passes: int
) -> None:
    """Each kind of pass has its graph, whatever the next batch's documents and anchors are; no Python cuts it."""
    model, thinker = thinking_model(make_model, SETTINGS[settings], num_key_value_heads=1, document_mask=True)
    tokens, graphs = tokens_of(model), []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    dense = [committed(model, thinker, tokens, anchors) for anchors in (ANCHORS, ANCHORS + 1)]
    monkeypatch.setattr(masks, "dense_mask", masks.block_mask)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True, backend=count)
    for anchors, expected in zip((ANCHORS, ANCHORS + 1), dense, strict=True):
        for found, each in zip(committed(model, thinker, tokens, anchors), expected, strict=True):
            torch.testing.assert_close(found, each, rtol=1e-9, atol=1e-9)
    torch._dynamo.reset()
    kernels = [graph.code.count("ops.higher_order.flex_attention(") for graph in graphs]
    assert kernels == [0, *[1] * passes], "text, with its mask written out; then the passes, the committed one last"


@torch.no_grad()
def test_thoughts_that_text_sees_would_leak_into_later_ones(make_model: MakeModel) -> None:
    """Why committed thoughts go into a second text pass: read from it, the second thought depends on the first."""
    model, thinker = thinking_model(make_model, GROW)
    tokens, text = tokens_of(model), text_of(model)
    chosen = Anchors(torch.tensor([[2, 6]] * 2), torch.ones(2, 2, dtype=torch.bool))
    states, memory = run_text(model.model, tokens, text)
    seeing, thoughts = committed(model, thinker, tokens, chosen.index)
    first, second = thoughts.unbind(1)
    assert not torch.allclose(seeing[:, 3:], states[:, 3:], atol=1e-2), "text sees the thoughts"
    again, _ = thinker(model.model, seeing, memory, text, chosen)
    torch.testing.assert_close(again[:, 0], first, rtol=1e-10, atol=1e-10)
    assert (again[:, 1] - second).abs().max() > 0.1, "a thought from a state that has seen a thought is another one"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", SETTINGS)
@torch.no_grad()
def test_thoughts_in_parallel_are_what_each_is_alone(make_model: MakeModel, settings: str, shape: str) -> None:
    model, thinker = thinking_model(make_model, SETTINGS[settings], **SHAPES[shape])
    tokens = tokens_of(model)
    found = think(model, thinker, tokens)
    for row in range(2):
        for number, anchor in enumerate(ANCHORS[row].tolist()):
            expected = alone(model, thinker, tokens, row, anchor)
            torch.testing.assert_close(found[row, number], expected, rtol=1e-10, atol=1e-10)
