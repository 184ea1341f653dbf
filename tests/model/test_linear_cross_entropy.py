"""The chunked loss against the ordinary one in float64: values, gradients, and the memory it does not use."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.model import linear_cross_entropy as module
from plumbline.model.linear_cross_entropy import (
    LossesAndGradient,
    chunk_tokens,
    compiled_losses_and_gradient,
    in_one_pass,
    linear_cross_entropy,
    losses_and_gradient,
)

TOKENS, WIDTH, VOCABULARY = 23, 12, 40


def problem(ignored: float = 0.3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, unembedding and labels; logits of several units, so that the soft cap bends them."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden, weight, labels.masked_fill(torch.rand(TOKENS, generator=generator) < ignored, -100)


def ordinary(
    hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, cross-entropy of each token and gradients of hidden and weight, in float64 and with all logits at once."""
    h, w = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = h @ w.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    nats = cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    loss = nats.sum() + z_loss * sum(logits[i].logsumexp(0) ** 2 for i in range(len(labels)) if labels[i] != -100)
    loss.backward()
    assert h.grad is not None
    assert w.grad is not None
    return loss.detach(), nats.detach(), h.grad, w.grad


@pytest.fixture(params=[losses_and_gradient, in_one_pass], ids=["as it runs", "for a compiler"])
def on_chunk(request: pytest.FixtureRequest) -> LossesAndGradient:
    """Return what is done with logits: also what is written for a compiler, without one here."""
    function: LossesAndGradient = request.param
    return function


@pytest.mark.parametrize("chunk", [1, 5, 8, 23, 1000])
@pytest.mark.parametrize(("cap", "z_loss"), [(None, 0.0), (3.0, 0.0), (None, 0.1), (3.0, 0.1)])
def test_loss_and_gradients_are_the_ordinary_ones(
    monkeypatch: pytest.MonkeyPatch, on_chunk: LossesAndGradient, chunk: int, cap: float | None, z_loss: float
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk * VOCABULARY)
    hidden, weight, labels = problem()
    expected = ordinary(hidden, weight, labels, cap, z_loss)
    loss, nats = linear_cross_entropy(hidden, weight, labels, cap=cap, z_loss=z_loss, on_chunk=on_chunk)
    (0.37 * loss).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    found = (loss.detach(), nats, hidden.grad / 0.37, weight.grad / 0.37)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)
    assert not nats.requires_grad
    with torch.no_grad():
        again = linear_cross_entropy(hidden, weight, labels, cap=cap, z_loss=z_loss)
    torch.testing.assert_close(again, (loss.detach(), nats))


def test_compiled_code_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 8 * VOCABULARY)  # 8, 8 and 7 tokens
    found = []
    for way in (losses_and_gradient, compiled_losses_and_gradient()):
        hidden, weight, labels = problem()
        loss, nats = linear_cross_entropy(hidden, weight, labels, cap=3.0, z_loss=0.1, on_chunk=way)
        found.append((loss, nats, *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(found[1], found[0])


def test_ignored_labels_have_no_gradient(monkeypatch: pytest.MonkeyPatch, on_chunk: LossesAndGradient) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7 * VOCABULARY)
    hidden, weight, labels = problem()
    linear_cross_entropy(hidden, weight, labels, z_loss=0.1, on_chunk=on_chunk)[0].backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad.abs().sum(1) == 0, labels == -100)


def test_nothing_but_ignored_labels(on_chunk: LossesAndGradient) -> None:
    hidden, weight, labels = problem(ignored=2.0)
    loss, nats = linear_cross_entropy(hidden, weight, labels, z_loss=0.1, on_chunk=on_chunk)
    loss.backward()
    assert hidden.grad is not None
    assert (loss.item(), nats.abs().sum().item(), hidden.grad.abs().sum().item()) == (0.0, 0.0, 0.0)


def test_gradients_are_handed_out_once_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled: list[int] = []
    scale = module._scale

    def noted(gradient: Tensor, by: Tensor) -> None:
        scaled.append(gradient.data_ptr())
        scale(gradient, by)

    monkeypatch.setattr(module, "_scale", noted)
    hidden, weight, labels = problem()
    loss, _ = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert scaled == [hidden.grad.data_ptr(), weight.grad.data_ptr()]
    with pytest.raises(RuntimeError, match="hands its gradients out once"):
        loss.backward()


def test_the_scale_of_a_loss_is_not_rounded_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """1/23 in bf16 is 0.3 % too small, and so would be every gradient."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7 * WIDTH)
    hidden, weight, labels = problem(dtype=torch.bfloat16)
    whole = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels)[0], (hidden, weight))
    scaled = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels)[0] / 23, (hidden, weight))
    for found, gradient in zip(scaled, whole, strict=True):
        assert torch.equal(found, (gradient.double() / 23).bfloat16())


def test_bf16_keeps_the_loss_in_fp32(monkeypatch: pytest.MonkeyPatch, on_chunk: LossesAndGradient) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7 * VOCABULARY)
    hidden, weight, labels = problem(dtype=torch.bfloat16)
    expected = ordinary(hidden, weight, labels, None, 1e-3)
    loss, nats = linear_cross_entropy(hidden, weight, labels, z_loss=1e-3, on_chunk=on_chunk)
    loss.backward()
    assert (loss.dtype, nats.dtype) == (torch.float32, torch.float32)
    for value, wanted, tolerance in zip((loss, nats, hidden.grad, weight.grad), expected, (1, 1, 4, 4), strict=True):
        assert value is not None
        assert (value.double() - wanted).abs().max() < tolerance * 2**-8 * wanted.abs().max()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("gradients", [True, False])
def test_autocast_computes_in_bf16_and_returns_fp32(gradients: bool) -> None:
    hidden, weight, labels = problem()
    with torch.set_grad_enabled(gradients):
        with torch.autocast("cpu", torch.bfloat16):
            loss, nats = linear_cross_entropy(hidden, weight, labels)
        rounded, _ = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels)
        exact, _ = linear_cross_entropy(hidden, weight, labels)
    assert (loss.dtype, nats.dtype) == (torch.float32, torch.float32)
    assert torch.equal(loss, rounded)
    assert not torch.equal(loss, exact)
    torch.testing.assert_close(loss, exact, rtol=2**-7, atol=0)
    if gradients:
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert (hidden.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)


class LargestTensor(TorchDispatchMode):
    """Record how many elements the largest tensor has that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("chunk", [None, 16])
def test_logits_of_all_tokens_are_never_alive_at_once(
    monkeypatch: pytest.MonkeyPatch, gradients: bool, chunk: int | None
) -> None:
    tokens, width, vocabulary = 256, 4, 64
    if chunk is None:
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 16 * vocabulary)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    with torch.set_grad_enabled(gradients), LargestTensor() as largest:  # type: ignore[no-untyped-call]
        labels = torch.zeros(tokens, dtype=torch.int64)
        loss, _ = linear_cross_entropy(hidden, weight, labels, cap=5.0, z_loss=0.1, chunk=chunk)
        if gradients:
            loss.backward()
    assert largest.elements == 16 * vocabulary


def test_chunks_on_a_gpu_are_whole_tiles_and_no_fewer_tokens_than_pay_for_reading_the_unembedding() -> None:
    assert [chunk_tokens(size, on_gpu=True) for size in (1000, 8192, 50304, 151936)] == [33536, 4096, 4096, 4096]
    assert [chunk_tokens(size, on_gpu=False) for size in (8192, 50304, 2**26)] == [4096, 667, 1]
