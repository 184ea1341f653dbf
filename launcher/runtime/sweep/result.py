"""Hold what a sweep knows of each of its cells: a line of results.jsonl."""

from dataclasses import asdict, dataclass
from typing import Any

Label = str | int | float | bool | None | list[Any] | dict[str, Any]


@dataclass(frozen=True)
class Outliers:
    """Hold what the diagnostics of a run say about outliers, and what they cost."""

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
    """Hold how a run ended and what it measured; None where that is not known. Losses in nats per token."""

    status: str = "pending"
    """pending, or an outcome of `sweep.worker`."""
    diverged: bool = False
    loss: float | None = None
    """Held-out loss, mean over corpora."""
    train_loss: float | None = None
    """Mean training loss over the last tenth of the logged steps."""
    exact_match: float | None = None
    thinking_exact_match: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    """Seconds of training alone."""
    outliers: Outliers | None = None
    result: dict[str, Any] | None = None
    """The run's result.json."""


@dataclass(frozen=True)
class Result:
    """Hold one cell of a sweep and the outcome of its run."""

    labels: dict[str, Label]
    """Axis -> label, or value where the axis is a config key."""
    seed: int
    signature: str
    """Signature of the run; cells of one signature share it."""
    run: str
    """Run folder of the cell."""
    hidden_size: int
    num_hidden_layers: int
    base_hidden_size: int | None
    base_num_hidden_layers: int | None
    parameters: int
    """Number of parameters without embedding and head."""
    weight_bits: int
    """Bits of the weights in training, as `activation_bits` and `kv_bits` of theirs; 16: not rounded."""
    activation_bits: int
    kv_bits: int
    weight_format: str | None
    lr: float
    outcome: RunOutcome = RunOutcome()

    def to_json(self) -> dict[str, Any]:
        """Return an object of results.jsonl, in which the outcome stands beside the cell."""
        line = asdict(self)
        outcome: dict[str, Any] = line.pop("outcome")
        return {**line, **outcome}
