"""Compute the proportions of a run, and warn where they are far from those published for text.

    tokens per parameter = D / N                           D training tokens, N parameters, embeddings included
    tau = 1 / (lr x weight_decay x steps) = B / (lr x weight_decay x D)   at the peak rate; B tokens of a batch
    warm-up share = steps of the warm-up / steps

tau is the fraction of a run over which AdamW's weights forget. Both laws are those of Power Lines (arXiv 2505.13738):
111M to 3.3B parameters under muP, one epoch of text, linear decay to zero. docs/parameterization.md has the ranges, and
which constants are quoted from secondary sources.
"""

from collections.abc import Iterator
from dataclasses import dataclass

FITTED_TOKENS_PER_PARAMETER = (20.0, 1280.0)  # the range over which tau's law was fitted
BEYOND_FITTED = 2.0  # a factor by which that range may be exceeded without a warning
FAR_FROM_LAW = 4.0  # a factor; losses are flat within a factor of two of the best batch (arXiv 2607.01487)
WARMUP_SHARES = (0.001, 0.1)  # 0.1 %: GPT-3 (arXiv 2005.14165, 375M of 300B tokens); 10 %: arXiv 2502.15938


def best_tau(tokens_per_parameter: float) -> float:
    """Return AdamW's best timescale as a fraction of the run, by the law of Power Lines."""
    return float(1.084 * tokens_per_parameter**-0.527)


def best_batch_tokens(tokens: int) -> float:
    """Return the batch in tokens with the lowest loss for a number of training tokens, by the law of Power Lines.

    The law is 0.0306 D^0.383 sequences of 2048 tokens each; it does not depend on the size of the model.
    """
    return float(2048 * 0.0306 * tokens**0.383)


@dataclass(frozen=True)
class Proportions:
    """Hold the length of a run relative to its model size, batch, weight decay and warm-up."""

    tokens: int
    """Training tokens."""
    batch_tokens: int
    """Tokens of one full batch."""
    tokens_per_parameter: float
    """Training tokens over all parameters of the model, embeddings included."""
    tau: float | None
    """AdamW's timescale as a fraction of the run, at the peak learning rate; None without weight decay."""
    warmup_share: float
    """Fraction of the steps during which the learning rate rises."""

    def __str__(self) -> str:
        """Return the proportions in one line, without tokens and batch."""
        tau = "no weight decay" if self.tau is None else f"tau {self.tau:.3g}"
        return (
            f"{tau}, warm-up {self.warmup_share:.2%} of the steps, {self.tokens_per_parameter:.3g} tokens per parameter"
        )

    def cautions(self) -> Iterator[str]:
        """Yield a sentence for each proportion that is outside the range known for text.

        The laws of tau and batch are not applied outside the tokens per parameter for which they were fitted.
        """
        low, high = WARMUP_SHARES
        if not low <= self.warmup_share <= high:
            yield (
                f"schedule.warmup lasts {self.warmup_share:.2%} of the steps: published runs take {low:.1%} to "
                f"{high:.0%}; 5% is one token per parameter at 20 tokens per parameter"
            )
        low, high = FITTED_TOKENS_PER_PARAMETER
        if not low / BEYOND_FITTED <= self.tokens_per_parameter <= high * BEYOND_FITTED:
            yield (
                f"{self.tokens_per_parameter:.3g} tokens per parameter: the laws of weight decay and batch are known "
                f"for {low:g} to {high:g} (arXiv 2505.13738); tune optimizer.weight_decay for this run itself"
            )
            return
        best = best_tau(self.tokens_per_parameter)
        if self.tau is not None and not best / FAR_FROM_LAW <= self.tau <= best * FAR_FROM_LAW:
            yield (
                f"tau = 1 / (lr x weight decay x steps) is {self.tau:.3g}, the best at {self.tokens_per_parameter:.3g} "
                f"tokens per parameter about {best:.2g} (arXiv 2505.13738): set horizon.tau={best:.2g}"
            )
        batch = best_batch_tokens(self.tokens)
        if not batch / FAR_FROM_LAW <= self.batch_tokens <= batch * FAR_FROM_LAW:
            yield (
                f"a batch of {self.batch_tokens:,} tokens: the best for {self.tokens:,} training tokens is about "
                f"{batch:,.0f} (arXiv 2505.13738); change data.global_batch_size"
            )
