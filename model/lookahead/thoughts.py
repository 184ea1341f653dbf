"""Run the passes that think: text once, then every thought of a batch in parallel, slot by slot.

A thought at token i has slots 1 to tau. Slot j stands at the position of token i + j - 1 and its final state predicts
token i + j. Its input is a state: slot 1 takes that of token i, slot j + 1 what slot j ended in. Thoughts read the
keys and values that the text pass left in every layer and never write there, so all thoughts of a batch grow at once
and are what each would be alone (arXiv 2603.20219 lets text read thoughts and thoughts read that text; then only one
thought for each sequence is exact).
"""

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from plumbline.model.attention.context import AttentionContext
from plumbline.model.blocks.kind import Block
from plumbline.model.decoder import Decoder
from plumbline.model.lookahead.anchors import Anchors
from plumbline.model.lookahead.masks import Entries, Text, attention_mask, slot_entries, text_entries
from plumbline.model.parameterization.tensors import TensorRule
from plumbline.model.recomputation import run_block

Growth = Literal["grow", "fixed", "at_once"]
Masks = Literal["dense", "blocks"]
Memory = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of each layer, [B, num_key_value_heads, tokens, head_dim] each."""


@dataclass(frozen=True)
class ThoughtSettings:
    """Configure how thoughts grow."""

    horizon: int
    """tau: slots of a thought."""
    growth: Growth
    """grow: one slot more in each pass. fixed: all slots in each of `passes` passes. at_once: all slots in one pass,
    and no state enters them."""
    passes: int
    """Number of passes with growth fixed."""
    bidirectional: bool
    """Whether a slot sees the later ones of its thought. If not, what a grown slot computed stays, and a pass computes
    the new slot alone."""
    detach_states: bool = False
    """Stop gradients where a state, the anchor's or a slot's, becomes an input."""
    detach_text: bool = False
    """Stop gradients from thoughts into the text pass."""
    masks: Masks = "dense"
    """While training on a GPU: written out, or in blocks for FlexAttention."""

    @property
    def passes_run(self) -> int:
        """Return the number of passes, one after the other, until a thought is whole."""
        return {"grow": self.horizon, "fixed": self.passes, "at_once": 1}[self.growth]

    @property
    def slots_run(self) -> int:
        """Return the number of slots that pass the blocks while a thought grows, over all its passes."""
        if self.growth == "grow" and self.bidirectional:
            return self.horizon * (self.horizon + 1) // 2
        return self.horizon * (self.passes if self.growth == "fixed" else 1)


class Retained:
    """Stand in for a layer's cache: keep what the layer makes of its tokens, and show it earlier ones."""

    length = 0  # of what a decoder counts positions from; ours are given

    def __init__(self, earlier: tuple[Tensor, Tensor] | None) -> None:
        self.earlier = earlier
        self.own: tuple[Tensor, Tensor] | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values; return them behind the earlier ones."""
        self.own = keys, values
        if self.earlier is None:
            return keys, values
        return torch.cat((self.earlier[0], keys), dim=2), torch.cat((self.earlier[1], values), dim=2)


def run_blocks(
    decoder: Decoder, x: Tensor, context: AttentionContext, earlier: Memory | None = None
) -> tuple[Tensor, Memory]:
    """Run all blocks on x [B, N, D], with `earlier` keys and values ahead of its own.

    Return the state and the keys and values. Keys and values are arguments and results of what activation checkpointing
    recomputes, so gradients flow through them.
    """
    memory = []
    for number, layer in enumerate(decoder.layers):
        arguments = (layer, x, context, *(earlier[number] if earlier is not None else (None, None)))
        x, keys, values = run_block(cast(Block, layer), _run_block, *arguments)
        memory.append((keys, values))
    return x, tuple(memory)


def _run_block(
    layer: nn.Module, x: Tensor, context: AttentionContext, keys: Tensor | None, values: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    retained = Retained(None if keys is None or values is None else (keys, values))
    x = layer(x, context, retained)
    assert retained.own is not None, "every softmax attention appends"
    return x, *retained.own


class Thinker(nn.Module):
    """Hold what thinking adds to a decoder: how a state becomes an input, and inputs for slots that have none yet."""

    tensors = (
        TensorRule("role|waiting", "embedding"),  # slots start as embeddings do
        # One number behind the final norm; a state becomes as large as an embedding, own factor included
        TensorRule("gain", "final_scalar", start=1.0, start_with="model.embed_tokens.weight"),
    )

    def __init__(self, settings: ThoughtSettings, width: int) -> None:
        super().__init__()
        self.settings = settings
        self.role = nn.Parameter(torch.empty(width))  # tells a slot from a token
        waiting = {"grow": 0, "fixed": settings.horizon - 1, "at_once": settings.horizon}[settings.growth]
        self.waiting = nn.Parameter(torch.empty(waiting, width)) if waiting else None
        has_states = settings.growth != "at_once"
        self.gain = nn.Parameter(torch.empty(1)) if has_states else None  # of states, which are larger than embeddings

    def forward(
        self, decoder: Decoder, states: Tensor, memory: Memory, text: Text, anchors: Anchors
    ) -> tuple[Tensor, Memory]:
        """Think at every anchor.

        Args:
            decoder: whose blocks think.
            states: final states of the text, [B, T, D].
            memory: its keys and values.
            text: where it stands.
            anchors: K of each row.

        Returns:
            The final states of all slots, [B, K, tau, D], and the keys and values of the slots in the last pass,
            thought by thought: [B, num_key_value_heads, K * tau, head_dim] for each layer.
        """
        index = anchors.index[:, :, None].expand(-1, -1, states.size(2))
        return self.think(decoder, states.gather(1, index), memory, text, anchors)

    def think(
        self, decoder: Decoder, states: Tensor, memory: Memory, text: Text, anchors: Anchors
    ) -> tuple[Tensor, Memory]:
        """Think as `forward` does, with the states of the anchors alone, [B, K, D]."""
        if self.settings.detach_text:
            states, memory = states.detach(), tuple((keys.detach(), values.detach()) for keys, values in memory)
        thinking = _Thinking(self, decoder, text, anchors, text_entries(text), memory)
        start = states[:, :, None]  # (B, K, 1, D)
        if self.settings.growth == "at_once":
            return thinking.run(self._wait(decoder, start), range(self.settings.horizon))
        start = self._feed(decoder, start)
        if self.settings.growth == "fixed":
            return self._refine(thinking, start)
        if self.settings.bidirectional:
            return self._grow(thinking, start)
        return self._append(thinking, start)

    def _grow(self, thinking: "_Thinking", inputs: Tensor) -> tuple[Tensor, Memory]:
        """Run slots 1 to s in pass s: what earlier slots compute changes as later ones join."""
        for length in range(1, self.settings.horizon + 1):
            states, memory = thinking.run(inputs, range(length))
            if length < self.settings.horizon:
                inputs = torch.cat((inputs, self._feed(thinking.decoder, states[:, :, -1:])), dim=2)
        return states, memory

    def _append(self, thinking: "_Thinking", inputs: Tensor) -> tuple[Tensor, Memory]:
        """Run slot s alone in pass s: earlier slots do not see it, so they stay as they are."""
        ends: list[Tensor] = []
        parts: list[Memory] = []
        for number in range(self.settings.horizon):
            numbers = range(number, number + 1)
            states, own = thinking.run(inputs, numbers)
            ends.append(states)
            parts.append(own)
            inputs = self._feed(thinking.decoder, states)
            thinking = thinking.having(numbers, own)
        return torch.cat(ends, dim=2), _by_thought(parts)

    def _refine(self, thinking: "_Thinking", start: Tensor) -> tuple[Tensor, Memory]:
        """Run all slots in each pass; slot j + 1 takes what slot j ended in, and waits for it in the first pass."""
        inputs = start
        if self.waiting is not None:
            inputs = torch.cat((start, self._wait(thinking.decoder, start)), dim=2)
        for remaining in reversed(range(self.settings.passes)):
            states, memory = thinking.run(inputs, range(self.settings.horizon))
            if remaining:
                inputs = torch.cat((start, self._feed(thinking.decoder, states[:, :, :-1])), dim=2)
        return states, memory

    def _wait(self, decoder: Decoder, like: Tensor) -> Tensor:
        """Return inputs of slots that no state enters, [B, K, slots, D], of the rows and thoughts of `like`."""
        assert self.waiting is not None, "there are such slots"
        waiting = (self.waiting + self.role) * decoder.embedding_multiplier
        return waiting.to(like.dtype).expand(*like.shape[:2], -1, -1)

    def _feed(self, decoder: Decoder, states: Tensor) -> Tensor:
        """Return final states as inputs: of the size of an embedding, and marked."""
        if self.settings.detach_states:
            states = states.detach()
        if not decoder.config.final_norm:  # nothing else keeps a recursion from growing
            states = F.rms_norm(states, states.shape[-1:])
        assert self.gain is not None, "states enter these slots"
        size = decoder.config.initializer_range * self.gain
        return (states * size + self.role).to(states.dtype) * decoder.embedding_multiplier


@dataclass(frozen=True)
class _Thinking:
    """Hold what all passes over one batch have in common."""

    thinker: Thinker
    decoder: Decoder
    text: Text
    anchors: Anchors
    seen: Entries
    """The text, and slots that stay as they are."""
    memory: Memory
    """Keys and values of these."""

    def having(self, numbers: range, own: Memory) -> "_Thinking":
        """Return the same with the slots `numbers` of all thoughts seen as well, which stay as they are."""
        seen = self.seen.then(slot_entries(self.text, self.anchors, numbers))
        return replace(self, seen=seen, memory=join(self.memory, own))

    def run(self, inputs: Tensor, numbers: range) -> tuple[Tensor, Memory]:
        """Run one pass of the slots `numbers` [B, K, s, D]."""
        query, settings = slot_entries(self.text, self.anchors, numbers), self.thinker.settings
        in_blocks = settings.masks == "blocks" and self.thinker.training and inputs.is_cuda
        mask = attention_mask(
            self.decoder.config, query, self.seen.then(query), settings.bidirectional, in_blocks=in_blocks
        )
        states, own = run_slots(self.decoder, inputs.flatten(1, 2), query.position, mask, self.memory)
        return states.unflatten(1, inputs.shape[1:3]), own


def run_slots(
    decoder: Decoder, inputs: Tensor, positions: Tensor, mask: Tensor | BlockMask, memory: Memory
) -> tuple[Tensor, Memory]:
    """Run slots with inputs [B, N, D] at positions [B, N], behind keys and values.

    Return their final states and their own keys and values. Inputs pass the embedding's dropout. A slot that stands
    beyond the model's last position, and predicts nothing that counts, is put there.
    """
    positions = positions.clamp_max(decoder.config.max_position_embeddings - 1)
    x = F.dropout(_at_positions(decoder, inputs, positions), decoder.config.dropout, decoder.training)
    x, own = run_blocks(decoder, x, _context(decoder, positions, mask, x), memory)
    return decoder.finish(x), own


def speak(states: Tensor, slots: Tensor, anchors: Anchors) -> Tensor:
    """Put states of one slot of each thought [B, K, D] in place of the anchors' in the states of the text [B, T, D]."""
    place = anchors.index.masked_fill(~anchors.valid, states.size(1))  # one place more, for what is not there
    place = place[:, :, None].expand(-1, -1, states.size(2))
    return F.pad(states, (0, 0, 0, 1)).scatter(1, place, slots.to(states.dtype))[:, :-1]


def join(first: Memory, second: Memory) -> Memory:
    """Append the keys and values of the second to those of the first."""
    return tuple(
        (torch.cat((keys, more_keys), 2), torch.cat((values, more_values), 2))
        for (keys, values), (more_keys, more_values) in zip(first, second, strict=True)
    )


def _by_thought(parts: list[Memory]) -> Memory:
    """Reorder keys and values of the single slots of all thoughts to one thought after the other."""

    def ordered(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors, dim=3).flatten(2, 3)  # each [B, H, K, head_dim]

    layers = zip(*parts, strict=True)
    return tuple((ordered([keys for keys, _ in layer]), ordered([values for _, values in layer])) for layer in layers)


def run_text(decoder: Decoder, input_ids: Tensor, text: Text) -> tuple[Tensor, Memory]:
    """Run the text pass: return final states [B, T, D] as of a plain decoder, and keys and values."""
    x = decoder.embed(input_ids, text.positions)
    x, memory = run_blocks(decoder, x, decoder.context(x, text.positions, text.document_ids))
    return decoder.finish(x), memory


def run_text_with_thoughts(
    decoder: Decoder, input_ids: Tensor, text: Text, anchors: Anchors, thoughts: Memory, horizon: int
) -> Tensor:
    """Run a second text pass in which tokens see the thoughts before them; return final states [B, T, D].

    With one anchor per row this is the paper's model; with more, every thought still comes from the first text pass.
    """
    query = text_entries(text)
    key = slot_entries(text, anchors, range(horizon)).then(query)
    mask = attention_mask(decoder.config, query, key, bidirectional=False)
    return run_text_behind(decoder, input_ids, text.positions, mask, thoughts)[0]


def run_text_behind(
    decoder: Decoder, input_ids: Tensor, positions: Tensor, mask: Tensor | BlockMask, earlier: Memory | None
) -> tuple[Tensor, Memory]:
    """Run tokens [B, T] behind earlier keys and values; return final states, and the tokens' own keys and values."""
    x = decoder.embed(input_ids, positions)
    x, memory = run_blocks(decoder, x, _context(decoder, positions, mask, x), earlier)
    return decoder.finish(x), memory


def _context(decoder: Decoder, positions: Tensor, mask: Tensor | BlockMask, x: Tensor) -> AttentionContext:
    """Return the context of tokens or slots x at positions [B, N], with a mask of our own."""
    return replace(decoder.context(x, positions), mask=mask)


def _at_positions(decoder: Decoder, x: Tensor, positions: Tensor) -> Tensor:
    """Add to inputs that are no tokens' embeddings what learned positions [B, N] add to an embedding."""
    if decoder.embed_positions is None:
        return x
    learned: Tensor = decoder.embed_positions(positions) * decoder.embedding_multiplier
    if decoder.embed_projection is not None:
        learned = decoder.embed_projection(learned)
    return x + learned
