"""Compute unembedding and cross-entropy in one step, without ever holding the full [tokens, vocab_size] logits.

The logits of a chunk of tokens are computed, turned into their loss and gradient, and dropped before the next chunk;
the backward pass only scales the stored gradients. That takes three matrix products in total, as many as usual
(recomputing the logits in the backward pass would cost a fourth). One implementation serves every supported torch,
including soft cap and z-loss, which `torch.nn.functional.linear_cross_entropy` lacks.

The processing of a chunk of logits is written twice: for eager torch, with in-place operations to save memory, and for
its compiler, which fuses all steps into one or two passes. The code that builds the model chooses.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
CHUNK_ELEMENTS = 2**25  # logits alive at once: 128 MiB in fp32
LOGITS_AT_ONCE = 2**24  # alive at once where they are only looked at, without a gradient
TILE = 128  # rows of a GPU's matrix-product tile
LossesAndGradient = Callable[[Tensor, Tensor, float | None, float], tuple[Tensor, Tensor, Tensor]]
"""Processes a chunk, given logits, labels, cap and z-loss, as `losses_and_gradient` does."""
LEAST_ON_GPU = 4096
"""Fewest tokens of a chunk on a GPU, whatever the vocabulary.

However few its tokens, a chunk reads the unembedding twice and updates its whole gradient, 12 bytes per element in
bf16. An H200 takes 8.3 ms and 0.8 GB for 16,384 tokens of width 768 and GPT-2's vocabulary in chunks of 2,048 tokens,
7.6 ms and 1.4 GB in chunks of 4,096, and 7.4 ms and 2.7 GB in chunks of 8,192 (docs/measurements-gpu.md).
"""


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap), or the logits without a cap (Gemma 2, arXiv 2408.00118 section 2)."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    cap: float | None = None,
    z_loss: float = 0.0,
    on_chunk: LossesAndGradient | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of hidden [N, hidden_size] through the unembedding weight [vocab_size, hidden_size].

    Args:
        hidden: final hidden states, already multiplied by the output multiplier.
        weight: unembedding matrix.
        labels: target ids [N]; -100 is ignored.
        cap: soft cap on the logits.
        z_loss: coefficient of logsumexp(logits)^2 (PaLM, arXiv 2204.02311 section 5), added to the loss.
        on_chunk: processes a chunk of logits if gradients are needed; None means `losses_and_gradient`.
        chunk: tokens whose logits are in memory at once; None chooses a number that suits the device.

    Returns:
        The sum over valid tokens of cross-entropy + z-loss (differentiable, fp32, nats), a scalar; and the
        cross-entropy of each token (detached, 0 where ignored), [N]. A sum, not a mean, because only the caller knows
        the valid tokens of the global batch.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # the products below are invisible to autograd, so cast here
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if chunk is None:
        chunk = chunk_tokens(len(weight), weight.is_cuda)
    if torch.is_grad_enabled():
        call = on_chunk or losses_and_gradient
        loss, cross_entropy = _LinearCrossEntropy.apply(hidden, weight, labels, cap, z_loss, call, chunk)  # type: ignore[no-untyped-call]
        return loss, cross_entropy
    pieces = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    parts = [_losses(soft_cap((h @ weight.T).float(), cap), y, z_loss)[:2] for h, y in pieces]
    return torch.stack([loss for loss, _ in parts]).sum(), torch.cat([nats for _, nats in parts])


def chunk_tokens(vocab_size: int, on_gpu: bool) -> int:
    """Return the number of tokens per chunk; on a GPU, whole tiles of its matrix products."""
    tokens = max(1, CHUNK_ELEMENTS // vocab_size)
    return max(tokens - tokens % TILE, LEAST_ON_GPU) if on_gpu else tokens


def _targets(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return which labels are ignored, and the labels with those replaced by class 0, both [n, 1]."""
    ignored = (labels == IGNORED)[:, None]
    return ignored, labels[:, None].masked_fill(ignored, 0)


def _losses(capped: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return summed loss, cross-entropy [n], log Z [n, 1] and the probabilities, which overwrite the capped logits.

    With m the largest logit, p its probability and Z the softmax normaliser, log Z = m - log p, so one pass of
    exponentials serves both loss and gradient.
    """
    ignored, target = _targets(labels)
    largest = capped.amax(-1, keepdim=True)
    short = largest - capped.gather(1, target)
    # Not exp_() and log(): on CPUs torch calls MKL for them, whose first call in a thread can round differently
    probabilities = torch.softmax(capped, -1, out=capped)
    log_largest = torch.xlogy(1.0, probabilities.amax(-1, keepdim=True))
    cross_entropy = (short - log_largest).masked_fill(ignored, 0.0)
    log_z = largest - log_largest
    # Not log_z[~ignored]: its size is only known on the device, so the host would have to wait
    squares = log_z.square().masked_fill(ignored, 0.0)
    return cross_entropy.sum() + z_loss * squares.sum(), cross_entropy[:, 0], log_z, probabilities


def losses_and_gradient(
    logits: Tensor, labels: Tensor, cap: float | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return summed loss, cross-entropy [n] and d loss / d logits [n, vocab_size] of a chunk of raw logits.

    The gradient has the dtype of the logits and is also computed for ignored labels; all else is in fp32. It is written
    by hand so that it can overwrite the logits: autograd would keep three tensors of this size instead of one. With p =
    softmax(capped) and Z its normaliser, d loss / d capped = p (1 + 2 z_loss log Z) - onehot(label).
    """
    capped = soft_cap(logits.float(), cap)
    slope = None if cap is None else 1 - (capped / cap).square()  # the derivative of the cap
    loss, cross_entropy, log_z, gradient = _losses(capped, labels, z_loss)
    if z_loss:
        gradient.mul_(1 + 2 * z_loss * log_z)
    _, target = _targets(labels)
    gradient.scatter_add_(1, target, torch.full_like(target, -1, dtype=gradient.dtype))
    if slope is not None:
        gradient.mul_(slope)
    return loss, cross_entropy, gradient.to(logits.dtype)


def in_one_pass(logits: Tensor, labels: Tensor, cap: float | None, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same as `losses_and_gradient`, in a form that a compiler can fuse completely."""
    capped = soft_cap(logits.float(), cap)
    log_z = capped.logsumexp(-1, keepdim=True)
    ignored, target = _targets(labels)
    cross_entropy = (log_z - capped.gather(1, target)).masked_fill(ignored, 0.0)
    loss = cross_entropy.sum() + z_loss * log_z.masked_fill(ignored, 0.0).square().sum()
    is_target = torch.arange(logits.size(1), device=logits.device) == target
    gradient = (capped - log_z).exp() * (1 + 2 * z_loss * log_z) - is_target.float()
    if cap is not None:
        gradient = gradient * (1 - (capped / cap).square())
    return loss, cross_entropy[:, 0], gradient.to(logits.dtype)


def compiled_losses_and_gradient() -> LossesAndGradient:
    """Return `in_one_pass`, compiled for each shape that occurs."""
    return torch.compile(in_one_pass, dynamic=False)


class _LinearCrossEntropy(torch.autograd.Function):
    """Compute both the loss and, chunk by chunk, the gradients of hidden and weight in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        cap: float | None,
        z_loss: float,
        on_chunk: LossesAndGradient,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """Accumulate loss and gradients over chunks; the weight's gradient is summed in fp32."""
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        nats = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        pieces = (tensor.split(chunk) for tensor in (hidden, labels, grad_hidden, nats))
        for h, y, grad_h, each in zip(*pieces, strict=True):
            loss, cross_entropy, grad_logits = on_chunk(h @ weight.T, y, cap, z_loss)
            total += loss
            each.copy_(cross_entropy)
            # Mask the rows of width hidden_size, not those of grad_logits, which are as wide as the vocabulary
            ignored = (y == IGNORED)[:, None]
            torch.mm(grad_logits, weight, out=grad_h)
            grad_h.masked_fill_(ignored, 0.0)
            grad_weight = _add_product(grad_weight, grad_logits.T, h.masked_fill(ignored, 0.0))
        assert grad_weight is not None, "an empty batch has no loss"
        ctx.gradients = [grad_hidden, grad_weight.to(weight.dtype)]  # save_for_backward would keep them alive
        ctx.mark_non_differentiable(nats)
        return total, nats

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_cross_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the stored gradients in place and return them, once: a copy would be as large as the weight."""
        if not ctx.gradients:
            raise RuntimeError("linear_cross_entropy hands its gradients out once; compute the loss again")
        grad_weight, grad_hidden = ctx.gradients.pop(), ctx.gradients.pop()
        _scale(grad_hidden, grad_loss)
        _scale(grad_weight, grad_loss)
        return grad_hidden, grad_weight, None, None, None, None, None


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return the fp32 product of left [V, n] and right [n, D], added in place to the total [V, D] if there is one.

    On NVIDIA GPUs the matrix product accumulates into the total directly; a separate bf16 product would be rounded,
    written, and read again.
    """
    if torch.version.cuda is not None and left.is_cuda and left.dtype == torch.bfloat16:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    product = left @ right
    return product.float() if total is None else total.add_(product)


def _scale(gradient: Tensor, scale: Tensor) -> None:
    """Multiply a gradient [n, m] by a scalar in fp32, in place, rounded once.

    A bf16 scale could be off by 0.4 %, and the whole gradient with it, since 1 over the number of targets need not be a
    power of two if labels are ignored. Works in pieces, because an fp32 copy would add to the peak memory of a step.
    """
    for part in gradient.split(max(1, CHUNK_ELEMENTS // gradient.size(1))):
        part.mul_(scale[None, None])  # GPUs would round a plain scalar to the gradient's dtype
