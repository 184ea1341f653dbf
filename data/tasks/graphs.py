"""Write examples about graphs as tokens: the edges in some order, the question, then the answer.

a b | c d | e f / s g = [s d g]
"""

from collections.abc import Sequence

import numpy as np

from plumbline.data.indexed import Int64s
from plumbline.data.tasks.task import Example, answering

BAR = 1
SLASH = 2
EQUALS = 3
FIRST_NODE = 4


def spell(edges: Int64s, asked: Sequence[int], answer: Int64s) -> Example:
    """Return the example for some edges, a question and an answer; nodes are numbered from 0.

    Args:
        edges: [E, 2], in reading order.
        asked: nodes between the slash and the equals sign.
        answer: [A] tokens.
    """
    prompt = np.full(prompt_length(len(edges), len(asked)), BAR, np.int64)
    end = 3 * len(edges)
    prompt[0:end:3], prompt[1:end:3] = FIRST_NODE + edges.T
    prompt[end - 1] = SLASH
    prompt[end:-1] = FIRST_NODE + np.asarray(asked)
    prompt[-1] = EQUALS
    return answering(np.concatenate((prompt, answer)), np.arange(len(prompt) + len(answer)) >= len(prompt))


def prompt_length(edges: int, asked: int) -> int:
    """Return the number of tokens up to the equals sign, given the numbers of edges and of nodes asked about."""
    return 3 * edges + asked + 1


def edges_of(tokens: Int64s) -> Int64s:
    """Return the tokens [E, 2] of the edges that a text by `spell` lists."""
    end = int(np.argmax(tokens == SLASH))
    return np.stack((tokens[0:end:3], tokens[1:end:3]), axis=1)


def asked_of(tokens: Int64s) -> Int64s:
    """Return the tokens [Q] of the nodes that a text by `spell` asks about."""
    slash, equals = (int(np.argmax(tokens == sign)) for sign in (SLASH, EQUALS))
    asked: Int64s = tokens[slash + 1 : equals]
    return asked
