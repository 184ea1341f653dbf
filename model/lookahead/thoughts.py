"""Run the passes of thinking: the text once, then every thought of a batch in parallel, slot by slot.

A thought at token i has slots 1 to tau. Slot j has the position of token i + j - 1 and its final state predicts token i
+ j. Its input is a state: slot 1 takes that of token i, slot j + 1 the final state of slot j. Thoughts read the keys
and values of the text pass in every layer but never add to them, so all thoughts of a batch grow at once, each as if it
were alone (in arXiv 2603.20219 text reads thoughts and thoughts read that text; then only one thought per sequence is
exact).
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
    """grow: one more slot in each pass. fixed: all slots in each of `passes` passes. at_once: all slots in one pass,
    without state inputs."""
    passes: int
    """Number of passes with growth fixed."""
    bidirectional: bool
    """Whether a slot sees later ones of its thought. If not, grown slots stay fixed, and each pass only computes the
    new slot."""
    detach_states: bool = False
    """Stop gradients where a state (of the anchor or a slot) becomes an input."""
    detach_text: bool = False
    """Stop gradients from thoughts into the text pass."""
    masks: Masks = "dense"
    """In training on a GPU: dense masks, or block masks for FlexAttention."""

    @property
    def passes_run(self) -> int:
        """Return the number of sequential passes until a thought is complete."""
        return {"grow": self.horizon, "fixed": self.passes, "at_once": 1}[self.growth]

    @property
    def slots_run(self) -> int:
        """Return the number of slots that run through the blocks, over all passes of a thought."""
        if self.growth == "grow" and self.bidirectional:
            return self.horizon * (self.horizon + 1) // 2
        return self.horizon * (self.passes if self.growth == "fixed" else 1)


class Retained:
    """Stand in for a layer's cache: record the keys and values of its tokens, and prepend earlier ones."""

    length = 0  # the decoder would count positions from here, but ours are given

    def __init__(self, earlier: tuple[Tensor, Tensor] | None) -> None:
        self.earlier = earlier
        self.own: tuple[Tensor, Tensor] | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Record the keys and values, and return them after the earlier ones."""
        self.own = keys, values
        if self.earlier is None:
            return keys, values
        return torch.cat((self.earlier[0], keys), dim=2), torch.cat((self.earlier[1], values), dim=2)


def run_blocks(
    decoder: Decoder, x: Tensor, context: AttentionContext, earlier: Memory | None = None
) -> tuple[Tensor, Memory]:
    """Run all blocks on x [B, N, D], with `earlier` keys and values before its own.

    Return the state, and the keys and values. Keys and values are arguments and results of the checkpointed function,
    so that gradients flow through them.
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
    """Hold the parameters that thinking adds to a decoder: they turn states into inputs, and start slots without."""

    tensors = (
        TensorRule("role|waiting", "embedding"),  # slot inputs are initialised like embeddings
        # One number after the final norm; it scales a state to the size of an embedding, including the user's own
        # factor
        TensorRule("gain", "final_scalar", start=1.0, start_with="model.embed_tokens.weight"),
    )

    def __init__(self, settings: ThoughtSettings, width: int) -> None:
        super().__init__()
        self.settings = settings
        self.role = nn.Parameter(torch.empty(width))  # distinguishes a slot from a token
        waiting = {"grow": 0, "fixed": settings.horizon - 1, "at_once": settings.horizon}[settings.growth]
        self.waiting = nn.Parameter(torch.empty(waiting, width)) if waiting else None
        has_states = settings.growth != "at_once"
        self.gain = nn.Parameter(torch.empty(1)) if has_states else None  # of states, which are larger than embeddings

    def forward(
        self, decoder: Decoder, states: Tensor, memory: Memory, text: Text, anchors: Anchors
    ) -> tuple[Tensor, Memory]:
        """Think at every anchor.

        Args:
            decoder: decoder whose blocks think.
            states: final states of the text, [B, T, D].
            memory: keys and values of the text.
            text: positions and documents of the text.
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
        """Think as `forward` does, given only the anchors' states [B, K, D]."""
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
        """Run slots 1 to s in pass s, since earlier slots change as later ones join."""
        for length in range(1, self.settings.horizon + 1):
            states, memory = thinking.run(inputs, range(length))
            if length < self.settings.horizon:
                inputs = torch.cat((inputs, self._feed(thinking.decoder, states[:, :, -1:])), dim=2)
        return states, memory

    def _append(self, thinking: "_Thinking", inputs: Tensor) -> tuple[Tensor, Memory]:
        """Run only slot s in pass s, since earlier slots do not see it and stay fixed."""
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
        """Run all slots in each pass; slot j + 1 takes the last state of slot j, or in pass 1 a learned input."""
        inputs = start
        if self.waiting is not None:
            inputs = torch.cat((start, self._wait(thinking.decoder, start)), dim=2)
        for remaining in reversed(range(self.settings.passes)):
            states, memory = thinking.run(inputs, range(self.settings.horizon))
            if remaining:
                inputs = torch.cat((start, self._feed(thinking.decoder, states[:, :, :-1])), dim=2)
        return states, memory

    def _wait(self, decoder: Decoder, like: Tensor) -> Tensor:
        """Return the learned inputs [B, K, slots, D] of slots without a state, with B and K from `like`."""
        assert self.waiting is not None, "there are such slots"
        waiting = (self.waiting + self.role) * decoder.embedding_multiplier
        return waiting.to(like.dtype).expand(*like.shape[:2], -1, -1)

    def _feed(self, decoder: Decoder, states: Tensor) -> Tensor:
        """Turn final states into inputs: rescaled to the size of an embedding, and marked."""
        if self.settings.detach_states:
            states = states.detach()
        if not decoder.config.final_norm:  # otherwise nothing would bound the recursion
            states = F.rms_norm(states, states.shape[-1:])
        assert self.gain is not None, "states enter these slots"
        size = decoder.config.initializer_range * self.gain
        return (states * size + self.role).to(states.dtype) * decoder.embedding_multiplier


@dataclass(frozen=True)
class _Thinking:
    """Hold what all passes over one batch share."""

    thinker: Thinker
    decoder: Decoder
    text: Text
    anchors: Anchors
    seen: Entries
    """The text, and slots that are already fixed."""
    memory: Memory
    """Keys and values of `seen`."""

    def having(self, numbers: range, own: Memory) -> "_Thinking":
        """Return a copy that also sees the now fixed slots `numbers` of all thoughts."""
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
    """Run slots with inputs [B, N, D] at positions [B, N], after the keys and values in `memory`.

    Return their final states and their own keys and values. Inputs pass the embedding's dropout. A slot beyond the
    model's last position, whose prediction is not used, is moved to that position.
    """
    positions = positions.clamp_max(decoder.config.max_position_embeddings - 1)
    x = F.dropout(_at_positions(decoder, inputs, positions), decoder.config.dropout, decoder.training)
    x, own = run_blocks(decoder, x, _context(decoder, positions, mask, x), memory)
    return decoder.finish(x), own


def speak(states: Tensor, slots: Tensor, anchors: Anchors) -> Tensor:
    """Replace the anchors' states in those of the text [B, T, D] by the states of one slot per thought [B, K, D]."""
    place = anchors.index.masked_fill(~anchors.valid, states.size(1))  # one extra position, for missing anchors
    place = place[:, :, None].expand(-1, -1, states.size(2))
    return F.pad(states, (0, 0, 0, 1)).scatter(1, place, slots.to(states.dtype))[:, :-1]


def join(first: Memory, second: Memory) -> Memory:
    """Append the keys and values of the second to those of the first."""
    return tuple(
        (torch.cat((keys, more_keys), 2), torch.cat((values, more_values), 2))
        for (keys, values), (more_keys, more_values) in zip(first, second, strict=True)
    )


def _by_thought(parts: list[Memory]) -> Memory:
    """Reorder keys and values from slot by slot to thought by thought."""

    def ordered(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors, dim=3).flatten(2, 3)  # each [B, H, K, head_dim]

    layers = zip(*parts, strict=True)
    return tuple((ordered([keys for keys, _ in layer]), ordered([values for _, values in layer])) for layer in layers)


def run_text(decoder: Decoder, input_ids: Tensor, text: Text) -> tuple[Tensor, Memory]:
    """Run the text pass; return the plain decoder's final states [B, T, D], and keys and values."""
    x = decoder.embed(input_ids, text.positions)
    x, memory = run_blocks(decoder, x, decoder.context(x, text.positions, text.document_ids))
    return decoder.finish(x), memory


def run_text_with_thoughts(
    decoder: Decoder, input_ids: Tensor, text: Text, anchors: Anchors, thoughts: Memory, horizon: int
) -> Tensor:
    """Run a second text pass in which tokens see the thoughts before them; return final states [B, T, D].

    With one anchor per row this is the paper's model; with more, every thought is still based on the first text pass.
    """
    query = text_entries(text)
    key = slot_entries(text, anchors, range(horizon)).then(query)
    mask = attention_mask(decoder.config, query, key, bidirectional=False)
    return run_text_behind(decoder, input_ids, text.positions, mask, thoughts)[0]


def run_text_behind(
    decoder: Decoder, input_ids: Tensor, positions: Tensor, mask: Tensor | BlockMask, earlier: Memory | None
) -> tuple[Tensor, Memory]:
    """Run tokens [B, T] after earlier keys and values; return their final states and own keys and values."""
    x = decoder.embed(input_ids, positions)
    x, memory = run_blocks(decoder, x, _context(decoder, positions, mask, x), earlier)
    return decoder.finish(x), memory


def _context(decoder: Decoder, positions: Tensor, mask: Tensor | BlockMask, x: Tensor) -> AttentionContext:
    """Return the context of tokens or slots x at positions [B, N] with the given mask."""
    return replace(decoder.context(x, positions), mask=mask)


def _at_positions(decoder: Decoder, x: Tensor, positions: Tensor) -> Tensor:
    """Add learned positions [B, N], if the model has them, to inputs that are not token embeddings."""
    if decoder.embed_positions is None:
        return x
    learned: Tensor = decoder.embed_positions(positions) * decoder.embedding_multiplier
    if decoder.embed_projection is not None:
        learned = decoder.embed_projection(learned)
    return x + learned
