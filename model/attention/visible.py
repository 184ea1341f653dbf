"""State which tokens of a text see each other: the one rule of dense masks, block masks and those of thoughts."""

from torch import Tensor

Pair = tuple[Tensor, Tensor]


def text_sees(query: Tensor, key: Tensor, window: int | None, documents: Pair | None) -> Tensor:
    """Return whether tokens attend to tokens, elementwise: to themselves and earlier ones, as far as `limited` lets.

    Args:
        query: places of the tokens that attend.
        key: places of those attended to.
        window: how many tokens a token sees, itself included; None means all before it.
        documents: documents of both; None masks no documents.
    """
    return limited(key <= query, query, key, window, documents)


def limited(seen: Tensor, query: Tensor, key: Tensor, window: int | None, documents: Pair | None) -> Tensor:
    """Return what remains of `seen` within the window and the document; see `text_sees`."""
    if window is not None:
        seen = seen & (query - key < window)
    if documents is not None:
        seen = seen & (documents[0] == documents[1])
    return seen
