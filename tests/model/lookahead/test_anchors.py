"""Anchors: which tokens they are, on what they depend, and what the slots behind them predict."""

import numpy as np
import pytest
import torch
from torch import Tensor

from plumbline.data.order import subkey
from plumbline.model.lookahead.anchors import (
    AnchorPolicy,
    Anchors,
    choose_anchors,
    slot_labels,
    uniform,
    whole_thoughts,
)

ROWS, LENGTH = 400, 24
INDEX = torch.arange(ROWS)


def labels_from(first: int, last: int = LENGTH) -> Tensor:
    labels = torch.full((ROWS, LENGTH), -100)
    labels[:, first:last] = torch.arange(first, last) + 1
    return labels


def chosen(policy: AnchorPolicy, count: int, labels: Tensor, seed: int = 0, **options: object) -> list[list[int]]:
    anchors = choose_anchors(policy, count, labels, uniform(seed, INDEX, LENGTH), **options)  # type: ignore[arg-type]
    assert anchors.index.shape == anchors.valid.shape == (ROWS, count)
    assert (anchors.index[~anchors.valid] == 0).all()
    return [row[valid].tolist() for row, valid in zip(anchors.index, anchors.valid, strict=True)]


def test_draws_are_even_and_depend_on_seed_and_sample_alone() -> None:
    draws = uniform(7, INDEX, LENGTH)
    assert ((draws > 0) & (draws < 1)).all()
    assert draws.mean().item() == pytest.approx(0.5, abs=0.01)
    assert draws.var().item() == pytest.approx(1 / 12, abs=0.003)
    columns = torch.corrcoef(draws.T) - torch.eye(LENGTH)
    assert columns.abs().max() < 0.25, "columns do not follow one another"
    assert torch.equal(uniform(7, INDEX.flip(0), LENGTH).flip(0), draws)
    assert torch.equal(uniform(7, INDEX, 8), draws[:, :8])
    for other in (uniform(8, INDEX, LENGTH), uniform(7, INDEX + 1000, LENGTH)):
        assert abs(torch.corrcoef(torch.stack((other.flatten(), draws.flatten())))[0, 1]) < 0.05


def test_draws_are_those_of_splitmix64() -> None:
    """In Python's integers, which do not wrap around."""
    golden = 0x9E3779B97F4A7C15

    def mixed(word: int) -> int:
        word %= 1 << 64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        word = (word ^ word >> 27) * 0x94D049BB133111EB % (1 << 64)
        return word ^ word >> 31

    rows = [mixed(index + 3 * golden) for index in (0, 5)]
    words = [[mixed(row + column * golden) for column in (1, 2, 3)] for row in rows]
    expected = [[((word >> 12) + 0.5) / 2**52 for word in row] for row in words]
    assert uniform(3, torch.tensor([0, 5]), 3).tolist() == expected
    # The order of the data draws from the same generator, by other code: the model may not import the data
    assert subkey(7, np.arange(3)).tolist() == [mixed(7 + number * golden) for number in (1, 2, 3)]


def test_stratified_takes_any_one_token_of_each_stretch() -> None:
    rows = chosen("stratified", 4, labels_from(0))
    assert all([place // 6 for place in row] == [0, 1, 2, 3] for row in rows)
    counts = torch.bincount(torch.tensor(rows).flatten(), minlength=LENGTH)
    assert counts.min() > 35, "every token is drawn, about 67 times each"
    late = chosen("stratified", 4, labels_from(9))
    assert all([(place - 9) * 4 // (LENGTH - 9) for place in row] == [0, 1, 2, 3] for row in late), "of what has labels"
    assert chosen("stratified", 4, labels_from(LENGTH - 2)) == [[LENGTH - 2, LENGTH - 1]] * len(late)


def test_entropy_takes_uncertain_tokens_more_often() -> None:
    entropy = torch.ones(ROWS, LENGTH)
    entropy[:, 3::6] = 5.0
    rows = chosen("entropy", 4, labels_from(0), entropy=entropy)
    assert all([place // 6 for place in row] == [0, 1, 2, 3] for row in rows)
    share = sum(place % 6 == 3 for row in rows for place in row) / (4 * ROWS)
    assert share == pytest.approx(0.5, abs=0.05), "five times as likely as each of the five others"


def test_response_starts_and_those_that_follow() -> None:
    labels = labels_from(5, 9)
    labels[:, 14:17] = 1
    assert chosen("response_start", 1, labels) == [[5]] * ROWS
    assert chosen("response_start", 3, labels) == [[5, 14]] * ROWS
    assert chosen("response_start", 2, labels_from(0)) == [[0]] * ROWS
    assert chosen("sequential", 5, labels) == [[5, 6, 7, 8, 14]] * ROWS


def test_random_takes_the_first_and_others_by_chance() -> None:
    rows = chosen("random", 4, labels_from(5))
    assert all(row[0] == 5 and len(set(row)) == 4 and row == sorted(row) for row in rows)
    counts = torch.bincount(torch.tensor([row[1:] for row in rows]).flatten(), minlength=LENGTH)
    assert counts[6:].min() > 30, "about 67 times each"
    rows = chosen("random", LENGTH, labels_from(5), probability=0.3)
    assert all(row[0] == 5 for row in rows)
    assert sum(len(row) - 1 for row in rows) / ROWS == pytest.approx(0.3 * 18, abs=0.5)


def test_slots_predict_the_tokens_after_their_anchor() -> None:
    labels = labels_from(0, 20)[:1]  # the token after token i is i + 1
    documents = torch.tensor([[0] * 8 + [1] * 16])
    anchors = Anchors(torch.tensor([[2, 6, 18, 0]]), torch.tensor([[True, True, True, False]]))
    found = slot_labels(anchors, labels, documents, 3)[0].tolist()
    assert found == [[3, 4, 5], [7, 8, -100], [19, 20, -100], [-100] * 3]
    near_the_end = Anchors(torch.tensor([[23]]), torch.tensor([[True]]))
    assert slot_labels(near_the_end, labels_from(0)[:1], torch.zeros_like(documents), 2).tolist() == [[[24, -100]]]
    whole = whole_thoughts(labels, documents, 3)[0]
    assert (whole >= 0).nonzero().flatten().tolist() == [*range(6), *range(8, 18)]
