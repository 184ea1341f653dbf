"""Hold what an export wrote and how it compares with the model, and the error if it differs."""

from dataclasses import dataclass

from plumbline.model.export.stock import Headroom

OBJECTIVE = "objective."  # prefix of tensors that the plain model does not have


class ExportError(ValueError):
    """Report an exported folder that computes something else than the model, or cannot be written."""


@dataclass(frozen=True)
class LookaheadReport:
    """Compare the thoughts of the folder's own code with the run's."""

    relative_error: float
    """max |logit difference| / max |logit| of a thought's slots, fp32."""
    greedy_tokens: int
    """Number of greedy tokens that agree, with a thought at every third (`verify.THINK_EVERY`)."""
    left_out: str | None
    """Why the folder cannot think after all, or None if it can."""

    def __str__(self) -> str:
        """Return the report in one line."""
        if self.left_out is not None:
            return f"left out: {self.left_out}"
        return f"slots' logits within {self.relative_error:.1e}, {self.greedy_tokens} greedy tokens equal"


@dataclass(frozen=True)
class ExportReport:
    """Describe what was written and how it compares."""

    folder: str
    architecture: str
    relative_error: float
    """max |logit difference| / max |logit|, fp32."""
    greedy_tokens: int
    """Number of greedy tokens compared, all of which agree."""
    rounded_error: float | None = None
    """By how much rounding the weights to bf16 changed the logits, relative to the largest; None if they are fp32."""
    own_code: bool = False
    """Whether the folder contains the code of its class, which a user must trust."""
    headroom: Headroom | None = None
    """Headroom of constant channels, if the target has them."""
    lookahead: LookaheadReport | None = None
    """Comparison of thoughts, for a run that was trained with latent lookahead."""
    only_with_thoughts: str | None = None
    """Warning that only predictions with thoughts were trained, which the folder's class does not make, else None."""
    left_out: str | None = None
    """What the objective has trained besides the plain model and the folder does not hold, or None."""
    unread: tuple[str, ...] = ()
    """Entries of config.json that some engines do not read: there the folder is another model, without an error."""

    @property
    def agreement(self) -> str:
        """Return how the folder compares with the model, in a line."""
        rounded = (
            "" if self.rounded_error is None else f"; rounded to bf16 since, logits within {self.rounded_error:.1e}"
        )
        return f"logits within {self.relative_error:.1e}, {self.greedy_tokens} greedy tokens equal{rounded}"

    @property
    def cautions(self) -> tuple[str, ...]:
        """Return warnings: that training did not improve the plain model, that some engines compute another one."""
        unread = (
            f"config.json has {', '.join(self.unread)}, which transformers reads. Engines such as llama.cpp do not, "
            "and compute another model without an error (docs/export.md)"
        )
        return (*filter(None, [self.only_with_thoughts]), *((unread,) if self.unread else ()))
