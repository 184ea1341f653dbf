"""Checksums of tensors: the definition, every single bit, every two bits that a plain sum would miss."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from plumbline.launcher.runtime.ranks import checksum as module
from plumbline.launcher.runtime.ranks.checksum import WORDS, checksum, checksums


def by_definition(tensor: Tensor) -> list[int]:
    words = tensor.contiguous().view(-1).view(WORDS[tensor.element_size()]).tolist()
    sums = sum(words), sum(place * word for place, word in enumerate(words))
    return [(total + 2**63) % 2**64 - 2**63 for total in sums]


def flipped(tensor: Tensor, *bits: tuple[int, int]) -> Tensor:
    """Return a copy in which some bits, each of a word, are the other way round."""
    changed = tensor.clone()
    words = changed.view(-1).view(WORDS[tensor.element_size()])
    for word, bit in bits:
        size = 8 * words.element_size()
        words[word] ^= 1 << bit if bit < size - 1 else -(1 << bit)
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 13), (0,)])
def test_it_is_what_the_definition_says(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (1000 * torch.randn(shape, generator=torch.manual_seed(1))).to(dtype)
    assert checksum(tensor).tolist() == by_definition(tensor)
    if len(shape) > 1:
        assert checksum(tensor.T).tolist() == by_definition(tensor.T.contiguous())


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.bfloat16, 16)])
def test_no_bit_and_no_pair_of_bits_is_missed(dtype: torch.dtype, bits: int) -> None:
    tensor = torch.randn(3, 4, generator=torch.manual_seed(2)).to(dtype)
    clean = checksum(tensor).tolist()
    single = [(word, bit) for word in range(12) for bit in range(bits)]
    assert all(checksum(flipped(tensor, one)).tolist() != clean for one in single)
    same_bit = [(one, other) for one, other in itertools.combinations(single, 2) if one[1] == other[1]]
    assert all(checksum(flipped(tensor, *pair)).tolist() != clean for pair in same_bit)


def test_two_elements_that_change_places_are_seen() -> None:
    tensor = torch.arange(100.0)
    changed = tensor.clone()
    changed[[3, 90]] = changed[[90, 3]]
    assert checksum(changed)[0] == checksum(tensor)[0]
    assert checksum(changed)[1] != checksum(tensor)[1]


@pytest.mark.parametrize("at_once", [1, 40, 250])
def test_no_more_is_widened_at_once_than_allowed(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    tensor = torch.randn(13, 79, generator=torch.manual_seed(3)).bfloat16()
    widened: list[int] = []
    to = Tensor.to

    def seen(values: Tensor, *options: object, **named: object) -> Tensor:
        widened.append(values.numel())
        return to(values, *options, **named)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(Tensor, "to", seen)
    assert checksum(tensor).tolist() == by_definition(tensor)
    assert max(widened) <= max(at_once, 2 * 32), "a row, or what is left beside the rows, is of the root of 1027"


def test_several_tensors_are_rows() -> None:
    tensors = [torch.ones(3), torch.zeros(2, 2, dtype=torch.bfloat16)]
    assert checksums(tensors, torch.device("cpu")).tolist() == [by_definition(tensor) for tensor in tensors]
