"""Who sees whom in latent lookahead.

| query         | earlier text                | other thoughts | own thought                  |
|---------------|-----------------------------|----------------|------------------------------|
| text          | as ever                     | never          | -                            |
| slot          | up to its anchor            | never          | all of it, or up to itself   |
| text, second  | as ever, in its own stream  | all before it  | -                            |

The second stream of text is there only when thoughts are committed. "As ever" means causal, within the sliding window,
and within the document if the configuration masks documents; the window counts positions, and the same holds for slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig
from model.lookahead.anchors import Anchors


@dataclass(frozen=True)
class Text:
    """Tokens of the rows: where they stand, and in which document if documents are masked."""

    positions: Tensor
    """[B, T]: position, as the rotary embedding takes it."""
    document_ids: Tensor | None
    """[B, T], or None if documents see each other."""
    window: int | None
    """Sliding window, in positions."""

    def positions_at(self, anchors: Anchors) -> Tensor:
        """[B, K]: positions of the anchors."""
        return self.positions.gather(1, anchors.index)

    def in_window(self, query: Tensor, key: Tensor) -> Tensor | bool:
        """[..., queries, keys] from positions of queries [..., queries] and keys [..., keys]."""
        return True if self.window is None else query[..., :, None] - key[..., None, :] < self.window


def text_of(config: ModelConfig, batch: Mapping[str, Tensor]) -> Text:
    """Where the tokens of a batch stand for this model."""
    if config.document_mask:
        return Text(batch["positions"], batch["document_ids"], config.sliding_window)
    rows, length = batch["input_ids"].shape
    places = torch.arange(length, device=batch["input_ids"].device)
    return Text(places.expand(rows, -1), None, config.sliding_window)


@dataclass(frozen=True)
class Slots:
    """Some slots of the thoughts of a batch, in one order for all rows: which thought, and which of its slots."""

    thought: Tensor
    """[S]: number of the anchor, 0 to K - 1."""
    number: Tensor
    """[S]: 0 for the first slot."""

    def positions(self, text: Text, anchors: Anchors) -> Tensor:
        """[B, S]: slot j of a thought stands where token j - 1 after the anchor does."""
        return text.positions_at(anchors)[:, self.thought] + self.number


def slots(thoughts: int, numbers: range, device: torch.device) -> Slots:
    """The slots `numbers` of all thoughts, thought by thought."""
    number = torch.arange(numbers.start, numbers.stop, device=device)
    thought = torch.arange(thoughts, device=device)
    return Slots(thought.repeat_interleave(len(number)), number.repeat(thoughts))


def slots_see_text(query: Slots, text: Text, anchors: Anchors) -> Tensor:
    """[B, 1, queries, T]: text up to the anchor."""
    index = anchors.index[:, query.thought]  # [B, queries]
    place = torch.arange(text.positions.size(1), device=index.device)
    seen = place <= index[:, :, None]
    seen = seen & text.in_window(query.positions(text, anchors), text.positions)
    if text.document_ids is not None:
        seen = seen & (text.document_ids.gather(1, index)[:, :, None] == text.document_ids[:, None])
    return seen[:, None]


def slots_see_slots(query: Slots, key: Slots, text: Text, anchors: Anchors, bidirectional: bool) -> Tensor:
    """[B, 1, queries, keys]: slots of the same thought; if not `bidirectional`, up to itself."""
    seen = query.thought[:, None] == key.thought
    if not bidirectional:
        seen = seen & (key.number <= query.number[:, None])
    near = text.in_window(query.positions(text, anchors), key.positions(text, anchors))
    return (seen & near).expand(anchors.index.size(0), -1, -1)[:, None]


def text_sees_text(text: Text) -> Tensor:
    """[B or 1, 1, T, T]: as in a plain decoder, written out."""
    place = torch.arange(text.positions.size(1), device=text.positions.device)
    seen = (place <= place[:, None])[None] & text.in_window(text.positions, text.positions)
    if text.document_ids is not None:
        seen = seen & (text.document_ids[:, :, None] == text.document_ids[:, None])
    return seen[:, None]


def text_sees_slots(key: Slots, text: Text, anchors: Anchors) -> Tensor:
    """[B, 1, T, keys]: all slots of the thoughts at earlier tokens."""
    index = anchors.index[:, key.thought]  # [B, keys]
    place = torch.arange(text.positions.size(1), device=index.device)
    seen = (place[:, None] > index[:, None]) & anchors.valid[:, key.thought][:, None]
    seen = seen & text.in_window(text.positions, key.positions(text, anchors))
    if text.document_ids is not None:
        seen = seen & (text.document_ids[:, :, None] == text.document_ids.gather(1, index)[:, None])
    return seen[:, None]
