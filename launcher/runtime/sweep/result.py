"""Hold the result of a cell: a line of results.jsonl."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plumbline.data.damage import in_words
from plumbline.launcher.runtime.system.files import finite, from_keys, read_json_lines

MATCHES = ("exact_match", "thinking_exact_match", "answer_match", "thinking_answer_match")
"""Shares of right held-out answers: the whole answer or only its conclusion, plain and with thoughts."""
Label = str | int | float | bool | None | list[Any] | dict[str, Any]


@dataclass(frozen=True)
class Outliers:
    """Hold a run's diagnostics of outliers, and their cost."""

    kurt: float | None
    """Kurtosis of the stream, mean over blocks of the last observation."""
    kurt_peak: float
    """The largest kurtosis of all blocks and observations."""
    mmr: float | None
    """Max-median ratio of the stream, mean over blocks of the last observation."""
    corr: float
    """Token correlation of the stream that reaches the head."""
    w8a8_delta: float | None
    """Nats per token that 8 bits of weights and activations add to the held-out loss."""
    tokens_per_second: float
    """Median speed over the logged steps."""


@dataclass(frozen=True)
class RunOutcome:
    """Hold how a run ended and what it measured; None for unknown values. Losses are in nats per token."""

    status: str = "pending"
    """pending, or an outcome of `sweep.worker`."""
    diverged: bool = False
    """Whether training broke down, or ended with a training loss above `run.scores.diverged_above`."""
    loss: float | None = None
    """Held-out loss, mean over corpora."""
    train_loss: float | None = None
    """Mean training loss over the last tenth of the logged steps."""
    exact_match: float | None = None
    thinking_exact_match: float | None = None
    answer_match: float | None = None
    thinking_answer_match: float | None = None
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict)
    """Score (one of MATCHES) -> step -> its mean over corpora, for every evaluation during training."""
    tokens: int | None = None
    seconds: float | None = None
    """Seconds of training only."""
    outliers: Outliers | None = None
    result: dict[str, Any] | None = None
    """The run's result.json."""

    @property
    def thinking_loss(self) -> float | None:
        """Return the held-out loss with thoughts, mean over corpora, of a run that ended and thinks."""
        return None if self.result is None else mean_of_corpora("thinking_loss", self.result)


def mean_of_corpora(metric: str, record: dict[str, Any]) -> float | None:
    """Return the mean of a held-out score over corpora, or None if there is none."""
    values = [value for key, value in record.items() if key.startswith("eval/") and key.endswith(f"/{metric}")]
    return sum(values) / len(values) if values else None


ADDED: dict[str, Any] = {"answer_match": None, "thinking_answer_match": None, "evaluations": {}, "group_size": None}
"""Keys that rows of older versions lack, with their defaults."""


@dataclass(frozen=True)
class Result:
    """Hold one cell of a sweep and the outcome of its run."""

    labels: dict[str, Label]
    """Axis -> label, or value if the axis is a config key."""
    seed: int
    signature: str
    """Signature of the run, shared by cells with the same signature."""
    run: str
    """Run folder of the cell."""
    hidden_size: int
    num_hidden_layers: int
    base_hidden_size: int | None
    base_num_hidden_layers: int | None
    parameters: int
    """Number of parameters without embedding and head."""
    weight_bits: int
    """Bits of the weights in training, like `activation_bits` and `kv_bits`; 16: not rounded."""
    activation_bits: int
    kv_bits: int
    weight_format: str | None
    lr: float
    outcome: RunOutcome = RunOutcome()
    group_size: int | None = None
    """Number of weights that share a scale in training, or None if ungrouped or not rounded."""

    def to_json(self) -> dict[str, Any]:
        """Return an object of results.jsonl, with the fields of the outcome at the top level."""
        line = asdict(self)
        outcome: dict[str, Any] = line.pop("outcome")
        return {**line, **outcome}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> "Result":
        """Restore a result from `to_json`, here or on another machine.

        Raises:
            KeyError: a value is missing.
            ValueError: a value has another type.
        """
        line = {**ADDED, **line}
        outcome = from_keys(RunOutcome, {**line, "loss": finite(line["loss"])})
        return from_keys(cls, {**line, "outcome": asdict(outcome)})


def read_rows(file: Path) -> list[Result]:
    """Return the cells of a results.jsonl.

    Raises:
        ValueError: a line is not a sweep's result, two disagree about a run, or there are no lines.
    """
    rows: list[Result] = []
    finished: dict[str, tuple[int, Result]] = {}  # signature -> line and row
    for number, line in read_json_lines(file):
        place = f"{file}, line {number}"
        try:
            row = Result.from_json(line)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{place}: not a row of a sweep's results.jsonl: {in_words(error)}") from error
        if row.outcome.loss is not None:
            first, other = finished.setdefault(row.signature, (number, row))
            if row.outcome.loss != other.outcome.loss:
                raise ValueError(
                    f"{place}: loss = {row.outcome.loss} of the run {row.signature}, which has {other.outcome.loss} in "
                    f"line {first}; keep one of the two"
                )
        rows.append(row)
    if not rows:
        raise ValueError(f"{file}: has no rows; give the results.jsonl of a sweep")
    return rows
