"""Latent lookahead in parallel against what it means: each thought alone, the whole expanded sequence run anew."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.context import attention_context
from model.decoder import CausalLM
from model.lookahead.anchors import Anchors
from model.lookahead.masks import Text
from model.lookahead.thoughts import Thinker, ThoughtSettings, run_text
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
        thinker.gain.fill_(30.0)
    return model, thinker


def text_of(model: CausalLM) -> Text:
    masked = model.config.document_mask
    places = torch.arange(LENGTH).expand(2, -1)
    begins = torch.stack([(DOCUMENTS[row][:, None] == DOCUMENTS[row]).int().argmax(0) for row in range(2)])
    return Text(places - begins if masked else places, DOCUMENTS if masked else None, model.config.sliding_window)


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
    """[tau, D]: one thought, every pass over text and slots as one sequence, nothing remembered."""
    decoder, settings, text = model.model, thinker.settings, text_of(model)
    positions, documents = text.positions[row], DOCUMENTS[row]
    begin = int((documents == documents[anchor]).int().argmax()) if model.config.document_mask else 0
    prefix = slice(begin, anchor + 1)
    visible = decoder.embed(tokens[row : row + 1, prefix], positions[None, prefix])
    size = visible.size(1)

    def run(slots: Tensor) -> Tensor:
        """[1, s, D] -> final states of text and slots, [1, size + s, D]."""
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
        if text.window is not None:
            seen = seen & (places[0][:, None] - places[0] < text.window)
        context = replace(attention_context(decoder.config, places, 0, None, x.dtype), mask=seen[None, None])
        if decoder.config.value_residual:
            context = decoder.with_first_values(context, x)
        for layer in decoder.layers:
            x = layer(x, context)
        return decoder.finish(x)

    def feed(state: Tensor) -> Tensor:
        if not decoder.config.final_norm:
            state = state / (state.square().mean(-1, keepdim=True) + torch.finfo(state.dtype).eps).sqrt()
        return (state * decoder.config.initializer_range * thinker.gain + thinker.role) * decoder.embedding_multiplier

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
