"""Decide which tokens and slots see which in latent lookahead, and write attention masks by it.

| query         | earlier text                | other thoughts | own thought                  |
|---------------|-----------------------------|----------------|------------------------------|
| text          | as ever                     | never          | -                            |
| slot          | up to its anchor            | never          | all of it, or up to itself   |
| text, second  | as ever, in its own stream  | all before it  | -                            |

The second stream of text is there only when thoughts are committed. "As ever" means causal, within the sliding window,
and within the document if the configuration masks documents; the window counts positions, and the same holds for slots.

`sees` is this table. A mask writes it out for every pair; a fused kernel evaluates it by itself, and passes over the
blocks in which nothing is seen.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from plumbline.model.config import ModelConfig
from plumbline.model.lookahead.anchors import Anchors


@dataclass(frozen=True)
class Text:
    """Hold where the tokens of the rows stand, and in which document if documents are masked."""

    positions: Tensor
    """[B, T]: position, as the rotary embedding takes it."""
    document_ids: Tensor | None
    """[B, T], or None if documents see each other."""


def text_of(config: ModelConfig, batch: Mapping[str, Tensor]) -> Text:
    """Return where the tokens of a batch stand for this model."""
    if config.document_mask:
        return Text(batch["positions"], batch["document_ids"])
    rows, length = batch["input_ids"].shape
    places = torch.arange(length, device=batch["input_ids"].device)
    return Text(places.expand(rows, -1), None)


@dataclass(frozen=True)
class Entries:
    """Hold what queries and keys are, [B, N] each: tokens of the text, slots of thoughts, or one after the other."""

    place: Tensor
    """A token's place in its row; a slot has that of its anchor."""
    thought: Tensor
    """Number of a slot's thought in its row, from 0; -1 for text."""
    number: Tensor
    """Number of a slot in its thought, from 0."""
    position: Tensor
    """Position, as the rotary embedding takes it; slot j of a thought stands where token j - 1 after the anchor is."""
    document: Tensor
    """Number of the document; 0 everywhere if documents see each other."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Entries":
        """Apply the same change to all five fields."""
        return Entries(*map(change, self._fields))

    def then(self, others: "Entries") -> "Entries":
        """Return these entries, followed by the others."""
        pairs = zip(self._fields, others._fields, strict=True)
        return Entries(*(torch.cat(pair, dim=1) for pair in pairs))

    @property
    def _fields(self) -> tuple[Tensor, ...]:
        return self.place, self.thought, self.number, self.position, self.document


def text_entries(text: Text) -> Entries:
    """Return the entries of all tokens."""
    place = torch.arange(text.positions.size(1), device=text.positions.device).expand_as(text.positions)
    nowhere = torch.zeros_like(place)
    return Entries(place, nowhere - 1, nowhere, text.positions, _documents(text))


def slot_entries(text: Text, anchors: Anchors, numbers: range) -> Entries:
    """Return the entries of the slots `numbers` of all thoughts, thought by thought."""
    shape = (*anchors.index.shape, len(numbers))
    number = torch.arange(numbers.start, numbers.stop, device=anchors.index.device).expand(shape)
    thought = torch.arange(shape[1], device=anchors.index.device)[:, None].expand(shape)
    # What is not there stands behind all text, which therefore never sees it
    place = torch.where(anchors.valid, anchors.index, text.positions.size(1))[:, :, None].expand(shape)
    position = text.positions.gather(1, anchors.index)[:, :, None] + number
    document = _documents(text).gather(1, anchors.index)[:, :, None].expand(shape)
    return Entries(place, thought, number, position, document).map(lambda field: field.flatten(1))


def _documents(text: Text) -> Tensor:
    return torch.zeros_like(text.positions) if text.document_ids is None else text.document_ids


def sees(query: Entries, key: Entries, window: int | None, bidirectional: bool) -> Tensor:
    """Return whether queries look at keys, elementwise.

    Args:
        query: what looks.
        key: what is looked at.
        window: sliding window, in positions.
        bidirectional: whether a slot sees later ones of its thought.
    """
    to_text = key.place <= query.place
    to_own = key.thought == query.thought
    if not bidirectional:
        to_own = to_own & (key.number <= query.number)
    to_committed = (query.thought < 0) & (key.place < query.place)
    seen = torch.where(key.thought < 0, to_text, to_own | to_committed)
    seen = seen & (key.document == query.document)
    return seen if window is None else seen & (query.position - key.position < window)


def attention_mask(
    config: ModelConfig, query: Entries, key: Entries, bidirectional: bool, in_blocks: bool = False
) -> Tensor | BlockMask:
    """Return the mask of all layers, written out or in blocks."""
    make = block_mask if in_blocks else dense_mask
    return make(query, key, config.sliding_window, bidirectional)


def dense_mask(query: Entries, key: Entries, window: int | None, bidirectional: bool) -> Tensor:
    """Return the mask written out: [B, 1, queries, keys], bool."""
    queries, keys = query.map(lambda field: field[:, :, None]), key.map(lambda field: field[:, None])
    return sees(queries, keys, window, bidirectional)[:, None]


def block_mask(query: Entries, key: Entries, window: int | None, bidirectional: bool) -> BlockMask:
    """Return the same mask as `dense_mask` in blocks, for FlexAttention."""

    def rule(row: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(query.map(lambda f: f[row, q]), key.map(lambda f: f[row, k]), window, bidirectional)

    (rows, queries), keys = query.place.shape, key.place.size(1)
    return create_block_mask(rule, rows, None, queries, keys, device=query.place.device)
