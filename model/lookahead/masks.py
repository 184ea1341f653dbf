"""Define which tokens and slots see each other in latent lookahead, and build attention masks from that.

| query         | earlier text                | other thoughts | own thought                  |
|---------------|-----------------------------|----------------|------------------------------|
| text          | as ever                     | never          | -                            |
| slot          | up to its anchor            | never          | all of it, or up to itself   |
| text, second  | as ever, in its own stream  | all before it  | -                            |

The second stream of text exists only if thoughts are committed. "As ever" means causal, within the sliding window, and
within the document if the configuration masks documents. The window counts positions, and also applies to slots.

`sees` implements this table. A dense mask evaluates it for every pair; a fused kernel evaluates it on the fly and skips
blocks that are fully masked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from plumbline.model.attention.visible import limited
from plumbline.model.config import ModelConfig
from plumbline.model.lookahead.anchors import Anchors


@dataclass(frozen=True)
class Text:
    """Hold the positions of tokens, and their documents if documents are masked."""

    positions: Tensor
    """[B, T]: position for the rotary embedding."""
    document_ids: Tensor | None
    """[B, T], or None if documents see each other."""


def text_of(config: ModelConfig, batch: Mapping[str, Tensor]) -> Text:
    """Return the positions and documents of a batch's tokens for this model."""
    if config.document_mask:
        return Text(batch["positions"], batch["document_ids"])
    rows, length = batch["input_ids"].shape
    places = torch.arange(length, device=batch["input_ids"].device)
    return Text(places.expand(rows, -1), None)


@dataclass(frozen=True)
class Entries:
    """Describe queries or keys, [B, N] each: tokens of the text, slots of thoughts, or both concatenated."""

    place: Tensor
    """Index of a token in its row; a slot has that of its anchor."""
    thought: Tensor
    """Number of a slot's thought in its row, from 0, or -1 for text."""
    number: Tensor
    """Number of a slot in its thought, from 0."""
    position: Tensor
    """Position for the rotary embedding; slot j of a thought has that of token j - 1 after the anchor."""
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
    # Missing anchors are placed after all text, which therefore never sees them
    place = torch.where(anchors.valid, anchors.index, text.positions.size(1))[:, :, None].expand(shape)
    position = text.positions.gather(1, anchors.index)[:, :, None] + number
    document = _documents(text).gather(1, anchors.index)[:, :, None].expand(shape)
    return Entries(place, thought, number, position, document).map(lambda field: field.flatten(1))


def _documents(text: Text) -> Tensor:
    return torch.zeros_like(text.positions) if text.document_ids is None else text.document_ids


def sees(query: Entries, key: Entries, window: int | None, bidirectional: bool) -> Tensor:
    """Return whether queries attend to keys, elementwise.

    Args:
        query: entries that attend.
        key: entries that are attended to.
        window: sliding window, in positions.
        bidirectional: whether a slot sees later ones of its thought.
    """
    to_text = key.place <= query.place
    to_own = key.thought == query.thought
    if not bidirectional:
        to_own = to_own & (key.number <= query.number)
    to_committed = (query.thought < 0) & (key.place < query.place)
    seen = torch.where(key.thought < 0, to_text, to_own | to_committed)
    return limited(seen, query.position, key.position, window, (query.document, key.document))


def attention_mask(
    config: ModelConfig, query: Entries, key: Entries, bidirectional: bool, in_blocks: bool = False
) -> Tensor | BlockMask:
    """Return the mask of all layers, dense or in blocks."""
    make = block_mask if in_blocks else dense_mask
    return make(query, key, config.sliding_window, bidirectional)


def dense_mask(query: Entries, key: Entries, window: int | None, bidirectional: bool) -> Tensor:
    """Return the dense mask: [B, 1, queries, keys], bool."""
    queries, keys = query.map(lambda field: field[:, :, None]), key.map(lambda field: field[:, None])
    return sees(queries, keys, window, bidirectional)[:, None]


def block_mask(query: Entries, key: Entries, window: int | None, bidirectional: bool) -> BlockMask:
    """Return the same mask as `dense_mask` as a block mask for FlexAttention."""

    def rule(row: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(query.map(lambda f: f[row, q]), key.map(lambda f: f[row, k]), window, bidirectional)

    (rows, queries), keys = query.place.shape, key.place.size(1)
    return create_block_mask(rule, rows, None, queries, keys, device=query.place.device)
