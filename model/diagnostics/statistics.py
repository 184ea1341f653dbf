"""Turn a tensor of activations into sums that add up over ranks, and the sums into statistics.

Every `..._sums` turns activations into sums over tokens or sequences (fp32 arithmetic, fp64 sums), and the matching
`..._statistics` computes the statistic from them. In between, sums can be added up over ranks: a mean of the ranks'
kurtoses would be biased, while the kurtosis from summed squares is that of all tokens together. Names that begin with
`max_` are maxima, which are reduced by max.

Shapes: B sequences, T tokens, D width. Papers: outlier features (arXiv 2405.19279), signal propagation (arXiv
2206.03126), kurtosis ahead of products (arXiv 2505.20524).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from plumbline.model.linear_cross_entropy import soft_cap

Sums = dict[str, Tensor]  # name -> sum over tokens, sequences or queries, fp64; `max_...` -> maximum
Statistics = dict[str, float]  # name -> value

POWER_STEPS = 20  # of the power iteration; the estimate is from below, and within a few percent for flat spectra
TINY = torch.finfo(torch.float32).tiny  # gives a tensor of zeros a ratio of 0


def outlier_sums(x: Tensor, real: Tensor | None = None) -> Sums:
    """Return the sums of activations x [B, T, D] for `outlier_statistics`.

    Only tokens that are `real` [B, T] count; None: all.
    """
    x, real = _counted(x, real)
    size = x.abs()
    largest = size.amax(-1)
    return {
        "channels": x.square().sum((0, 1)).double(),  # (D)
        "tokens": real.sum().double(),
        "ratios": (largest / _median(size)).where(largest > 0, 0.0).double().sum(),
    }


def _counted(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x in fp32, zero where a token does not count, and which tokens count."""
    if real is None:
        return x.float(), x.new_ones(x.shape[:2], dtype=torch.bool)
    return x.float().where(real[..., None], 0.0), real


def _median(values: Tensor) -> Tensor:
    """Return the lower median along the last dimension, by sorting since `median` is not deterministic on GPUs."""
    return values.sort(-1).values[..., (values.size(-1) - 1) // 2]


def outlier_statistics(sums: Sums) -> Statistics:
    """Return the kurtosis over channels and the max-to-median ratio of activations.

    With s_j the RMS of channel j: kurt = mean(s^4) / mean(s^2)^2, uncentred, in [1, D] (arXiv 2405.19279 eq. 1); mmr =
    mean over tokens of max |x| / (lower) median |x|, 0 for a token of zeros.
    """
    channels = sums["channels"]
    return _floats(
        kurt=channels.square().mean() / channels.mean().square(),
        mmr=sums["ratios"] / sums["tokens"],
    )


def stream_sums(x: Tensor, real: Tensor | None = None) -> Sums:
    """Return the sums of the residual stream x [B, T, D], per sequence since rows must not mix.

    Only tokens that are `real` [B, T] count; None: all.
    """
    x, real = _counted(x, real)
    lengths = real.sum(1).double()  # (B)
    token_squares = x.square().sum(-1)  # (B, T)
    totals = x.sum(1).double().square().sum(-1)  # (B): |sum of the tokens|^2
    with torch.autocast(x.device.type, enabled=False):
        # |X X^T|_F = |X^T X|_F, so compute the smaller product
        gram = x @ x.mT if x.size(1) < x.size(2) else x.mT @ x
        top = top_eigenvalue(gram)
    energy = token_squares.double().sum(-1)  # (B): |X|_F^2
    return {
        **outlier_sums(x, real),
        "sequences": (lengths > 0).sum().double(),
        "pairs": (lengths * (lengths - 1)).sum(),
        "products": (totals - energy).sum(),
        "product_squares": gram.square().sum().double() - token_squares.square().sum().double(),
        "mean_part": (totals * (x.size(1) / lengths.clamp_min(1))).sum() / x.size(1),
        "stable_rank": (energy / top).sum(),
    }


def stream_statistics(sums: Sums) -> Statistics:
    """Return size, outliers and signal propagation of the stream.

    With X the stream over its RMS and G = X X^T / D the products of tokens of one sequence: rms; kurt and mmr of
    `outlier_statistics`; corr_mean and corr_rms = mean and RMS of G off its diagonal, 1 when all tokens are alike;
    rank1_resid = |X - mean token|_F / |X|_F, 0 likewise; stable_rank = mean over sequences of
    |X|_F^2 / |X|_2^2, from 1 to min(T, D).
    """
    channels = sums["channels"]
    energy = channels.sum()
    mean_square = energy / (sums["tokens"] * channels.numel())
    scale = channels.numel() * mean_square  # normalises the product of two tokens to an entry of G
    pairs = sums["pairs"].clamp_min(1)  # none where each sequence has one token
    rest = _floats(
        rms=mean_square.sqrt(),
        corr_mean=sums["products"] / pairs / scale,
        corr_rms=(sums["product_squares"].clamp_min(0) / pairs).sqrt() / scale,
        rank1_resid=((energy - sums["mean_part"]).clamp_min(0) / energy).sqrt(),
        stable_rank=sums["stable_rank"] / sums["sequences"],
    )
    return {**outlier_statistics(sums), **rest}


def top_eigenvalue(gram: Tensor) -> Tensor:
    """Return the largest eigenvalue of each positive semidefinite matrix of gram [B, N, N], as [B] in fp64.

    It is estimated by power iteration.
    """
    start = torch.randn(gram.size(-1), 1, generator=torch.Generator().manual_seed(0))
    vector = start.to(gram.device, non_blocking=True).expand(gram.size(0), -1, -1)
    # Divided by its trace, the sum of all eigenvalues, it never grows a vector, and four products cannot underflow it
    shrinking = gram / gram.diagonal(dim1=1, dim2=2).sum(1).clamp_min(TINY)[:, None, None]
    for number in range(POWER_STEPS):
        vector = shrinking @ vector
        if number % 4 == 3:  # not each time: on a GPU the cost is the host's time for launching small operators
            vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(TINY)
    return (vector.mT @ (gram @ vector)).flatten().clamp_min(TINY).double()


def branch_sums(before: Tensor, after: Tensor, skip: float) -> Sums:
    """Return the sums of what a branch adds to the stream, given the stream before and after it, both [B, T, D].

    `skip` is the factor on the stream where the branch is added, or 0 if the branch replaces it.
    """
    before = before.float()
    added = after.float() - skip * before
    return {"added": added.square().sum().double(), "stream": before.square().sum().double()}


def branch_statistics(sums: Sums) -> Statistics:
    """Return the ratio rms(branch) / rms(stream before)."""
    return _floats(ratio=(sums["added"] / sums["stream"]).sqrt())


def gemm_sums(x: Tensor) -> Sums:
    """Return the sums of the input of a product, [..., D], for `gemm_statistics`."""
    squares = x.float().square()
    kurtosis = squares.square().mean(-1) / squares.mean(-1).square().clamp_min(TINY)
    return {"kurtosis": kurtosis.double().sum(), "tokens": _count(x, kurtosis.numel())}


def gemm_statistics(sums: Sums) -> Statistics:
    """Return the mean over tokens of mean_j(x_j^4) / mean_j(x_j^2)^2, in [1, D]; about 3 for Gaussian activations.

    FOG (arXiv 2505.20524) watches it on queries, keys and values, on the input of down_proj and on a block's output.
    """
    return _floats(kurt=sums["kurtosis"] / sums["tokens"])


def attention_sums(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    stride: int,
    cap: float | None = None,
    sinks: Tensor | None = None,
    real: Tensor | None = None,
) -> Sums:
    """Return the sums of one softmax attention, for every `stride`-th query.

    Args:
        query: [B, H, T, head_dim], as passed to the kernel.
        key: [B, H_kv, S, head_dim].
        mask: True where a query may attend, or added to the logits; broadcasts to [B, H, T, S].
        is_causal: query i may attend to keys up to i.
        scale: of the logits; None means 1 / sqrt(head_dim).
        stride: at least 1; the last query of each stride is measured, since the first ones have few keys.
        cap: logits become cap * tanh(logits / cap).
        sinks: [H], a logit per head in the softmax: one more key for every query, except for "sink".
        real: [B, T], the queries that count; None: all.
    """
    length, keys = query.size(2), key.size(2)
    chosen = torch.arange(min(stride, length) - 1, length, stride, device=query.device)
    key = key.float().repeat_interleave(query.size(1) // key.size(1), dim=1)
    with torch.autocast(query.device.type, enabled=False):
        logits = query[:, :, chosen].float() @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
    logits = soft_cap(logits, cap)
    if is_causal:
        logits = logits.masked_fill(torch.arange(keys, device=query.device) > chosen[:, None], -math.inf)
    if mask is not None:
        rows = mask.expand(*mask.shape[:-2], length, keys)[..., chosen, :]
        logits = logits.masked_fill(~rows, -math.inf) if mask.dtype == torch.bool else logits + rows
    if sinks is not None:
        logits = torch.cat((logits, sinks.float()[:, None, None].expand(*logits.shape[:-1], 1)), dim=-1)
    if real is not None:
        logits = logits.masked_fill(~real[:, None, chosen, None], -math.inf)  # without a key, a query counts nowhere
    weights = logits.softmax(-1)  # (B, H, T / stride, S), and the learned sink
    visible = logits.isfinite().sum(-1)
    free = visible > 1  # a query with one key has no choice: its entropy says nothing
    sees_first = free & logits[..., 0].isfinite()
    relative = torch.special.entr(weights).sum(-1) / visible.clamp_min(2).log()
    return {
        "entropy": relative.where(free, 0.0).double().sum((0, 2)),  # (H)
        "queries": free.double().sum((0, 2)),
        "sink": weights[..., 0].where(sees_first, 0.0).double().sum((0, 2)),
        "sink_queries": sees_first.double().sum((0, 2)),
        "max_logit": logits.max().double(),
    }


def attention_statistics(sums: Sums) -> Statistics:
    """Return entropy, sink and largest logit over the queries that attend to i > 1 keys.

    entropy = entropy / log(i), in [0, 1]; sink = weight on token 0, if it is visible; max_logit = the largest logit.
    The first two are given as means over heads, and for the head with the least entropy or the largest sink.
    """
    entropy, sink = (sums[a] / sums[b].clamp_min(1) for a, b in (("entropy", "queries"), ("sink", "sink_queries")))
    return _floats(
        entropy=entropy.mean(),
        entropy_min=entropy.min(),
        sink=sink.mean(),
        sink_max=sink.max(),
        max_logit=sums["max_logit"],
    )


def logit_sums(logits: Tensor) -> Sums:
    """Return the sums of the logits [..., V] of a chunk of tokens, fp32."""
    return {
        "log_z_squares": logits.logsumexp(-1).double().square().sum(),
        "squares": logits.square().sum(-1).double().sum(),
        "tokens": _count(logits, logits[..., 0].numel()),
        "entries": _count(logits, logits.numel()),
        "max_logit": logits.max().double(),
    }


def logit_statistics(sums: Sums) -> Statistics:
    """Return the size of logits: z = mean(logsumexp(logits)^2), the largest (max), and the root mean square (rms).

    z is what a z-loss keeps small.
    """
    return _floats(
        z=sums["log_z_squares"] / sums["tokens"],
        max=sums["max_logit"],
        rms=(sums["squares"] / sums["entries"]).sqrt(),
    )


def size_sums(x: Tensor) -> Sums:
    """Return the sums of any activations for `size_statistics`."""
    return {"squares": x.float().square().sum().double(), "entries": _count(x, x.numel())}


def size_statistics(sums: Sums) -> Statistics:
    """Return the root mean square."""
    return _floats(rms=(sums["squares"] / sums["entries"]).sqrt())


def update_sums(before: Tensor, after: Tensor) -> Sums:
    """Return the sums of (a rank's part of) a weight, before and after an update."""
    return {"moved": (after - before).double().square().sum(), "weight": before.double().square().sum()}


def update_statistics(sums: Sums) -> Statistics:
    """Return the relative update: rms(change of the weight) / rms(weight before)."""
    return _floats(rms=(sums["moved"] / sums["weight"]).sqrt())


def gain_sums(gain: Tensor) -> Sums:
    """Return the sums of (a rank's part of) a learned gain; the part may be empty."""
    wide = torch.cat((gain.flatten().double(), gain.new_full((1,), -math.inf, dtype=torch.float64)))
    low = torch.cat((-gain.flatten().double(), gain.new_full((1,), -math.inf, dtype=torch.float64)))
    return {
        "sum": gain.double().sum(),
        "entries": _count(gain, gain.numel()),
        "max_": wide.max(),
        "max_negative": low.max(),
    }


def gain_statistics(sums: Sums) -> Statistics:
    """Return the mean, the minimum and the maximum of all entries."""
    return _floats(mean=sums["sum"] / sums["entries"], min=-sums["max_negative"], max=sums["max_"])


def gradient_sums(query: Tensor, key: Tensor, value: Tensor) -> Sums:
    """Return the sums of the gradients of one block's query, key and value matrices."""
    pairs = (("query", query), ("key", key), ("value", value))
    return {name: gradient.double().square().sum() for name, gradient in pairs}


def gradient_statistics(sums: Sums) -> Statistics:
    """Compare queries and keys with values: ratio_q_v = |gradient of W_Q| / |gradient of W_V|, ratio_k_v likewise.

    They fall to 0 under rank collapse (arXiv 2206.03126).
    """
    return _floats(ratio_q_v=(sums["query"] / sums["value"]).sqrt(), ratio_k_v=(sums["key"] / sums["value"]).sqrt())


# Kind of measurement -> its statistics; observer.py defines what is measured under which keys
STATISTICS: dict[str, Callable[[Sums], Statistics]] = {
    "stream": stream_statistics,
    "branch": branch_statistics,
    "gemm_in": gemm_statistics,
    "attn_in": gemm_statistics,
    "attn": attention_statistics,
    "logits": logit_statistics,
    "emb": size_statistics,
    "update": update_statistics,
    "gain": gain_statistics,
    "grad": gradient_statistics,
}


def _count(like: Tensor, number: int) -> Tensor:
    return torch.full((), float(number), dtype=torch.float64, device=like.device)  # filled on the device: no transfer


def _floats(**values: Tensor) -> Statistics:
    return {name: float(value) for name, value in values.items()}
