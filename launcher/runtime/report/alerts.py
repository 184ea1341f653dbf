"""Find what deserves attention: numbers that are not finite, losses that spike or end high, kurtosis off its trend.

The last is the early warning of arXiv 2505.20524: in a run that failed at 15 billion tokens, the kurtosis of queries,
keys and values left its trend at 3 billion and the gradient norm at 12 billion. We watch that of the stream and of the
inputs of other products as well. There is no absolute threshold, since what is normal differs between models: each run
is compared with its own beginning.
"""

import math
from dataclasses import dataclass

import numpy as np

from plumbline.launcher.runtime.config.guards import TransferConfig
from plumbline.launcher.runtime.report.history import Floats, History, Series
from plumbline.launcher.runtime.run.outliers import usual_range
from plumbline.launcher.runtime.scoring.scores import worse_than_guessing

TREND = (
    "stream/kurt",
    *(f"gemm_in/kurt_{name}" for name in ("qkv", "mlp2", "block")),
    *(f"attn_in/kurt_{name}" for name in ("q", "k", "v")),
)
MIN_OBSERVATIONS = 10  # of a quantity before its trend is judged; the first half of them sets the trend
TREND_ERRORS = 5.0  # standard errors of the prediction
TREND_FACTOR = 1.25  # and at least this factor above the prediction
IN_A_ROW = 2  # observations
SPIKE_WINDOW = 32  # logged steps before a step from which its loss is predicted
SPIKE_DEVIATIONS = 8.0  # robust standard deviations
SPIKE_NATS = 0.1  # and at least this much
SIZE_FACTOR = TransferConfig().factor  # ratio of update sizes to the base run, either way: the guard's default


@dataclass(frozen=True)
class Alert:
    """Describe something in a run that deserves attention."""

    kind: str
    """non_finite, skipped, loss_spike, diverged, trend, size or went_back."""
    key: str
    """Name of the number in metrics.jsonl."""
    step: int
    """Step at which it begins."""
    message: str

    def __str__(self) -> str:
        """Return the alert in one line."""
        return f"step {self.step}: {self.kind} of {self.key}: {self.message}"


@dataclass(frozen=True)
class Advice:
    """Explain a kind of alert, and what to do about it."""

    title: str
    text: str
    command: str = ""
    """Command to run first, with placeholders `run` and `step` of the first alert."""


SAMPLES = "python launcher/show.py {run} --step {step} --loss"
ADVICE = {
    "non_finite": Advice(
        "Numbers that are not finite",
        "Look first at what is not finite earliest. A loss or gradient: look at the samples of that step; if they are "
        "sound, lower optimizer.lr or lengthen schedule.warmup, and go on from a checkpoint before it. A diagnostic "
        "alone does no harm to training.",
        SAMPLES,
    ),
    "skipped": Advice(
        "Updates that were skipped",
        "The gradient was not finite, so the weights stayed as they were. One now and then does no harm; several in a "
        "row end the run: look at the samples of the step, then lower optimizer.lr or lengthen schedule.warmup.",
        SAMPLES,
    ),
    "loss_spike": Advice(
        "Loss spikes",
        "Look at the samples of the step: damaged text, or text in another language, is a spike that training does not "
        "suffer from. If the samples are as usual, or the loss does not come back, the rate is too high: lower "
        "optimizer.lr, lengthen schedule.warmup, or lower optimizer.grad_clip.",
        SAMPLES,
    ),
    "diverged": Advice(
        "A loss above that of guessing",
        "The run has made all its steps, and its model predicts worse than one that gives every token the same "
        "probability. Lower optimizer.lr or lengthen schedule.warmup, and train again.",
    ),
    "trend": Advice(
        "Kurtosis that leaves its trend",
        "A few channels begin to carry the stream, or the queries, keys or values; the latter showed in the runs of "
        "arXiv 2505.20524 long before the loss. See under Outliers in which block, and what int8 would cost. If it "
        "goes on: lower optimizer.lr, or train with blocks that have no outliers (docs/blocks.md); keep the "
        "checkpoints from before.",
    ),
    "size": Advice(
        "Updates of another size than at the base",
        "The table of the parameterization is not in force: a learning rate, an eps or a count of Adam's steps is not "
        "the table's, so what was tuned at the base does not carry over. See under Updates which roles, and since "
        "when; plan.py --parameters prints the table (docs/guards.md).",
    ),
    "went_back": Advice(
        "Returns to a checkpoint",
        "A guard did not trust some steps, so the run went on from before them, without their data. Curves are those "
        "of the run as it is now; interventions.jsonl has what was left out. Several in a short time are hardly the "
        "fault of data: lower optimizer.lr (docs/guards.md).",
    ),
}
"""Kind of alert -> what to do about it."""


def find_alerts(history: History, vocab_size: int | None = None) -> list[Alert]:
    """Return all alerts of a run by step; `vocab_size` is needed to know the loss of guessing."""
    alerts = [*_non_finite(history), *_skipped(history)]
    if "loss" in history.series:
        alerts += loss_spikes(history.series["loss"])
        alerts += [Alert("went_back", "loss", made.back_to, str(made)) for made in history.interventions]
        alerts += _diverged(history, vocab_size)
    for quantity in TREND:
        for place, series in history.layers(quantity).items():
            alerts += trend_alerts(f"{quantity}/{place}", series)
    for key, series in history.series.items():
        if key.startswith("transfer/"):
            alerts += _size_alerts(key, series)
    return sorted(alerts, key=lambda alert: (alert.step, alert.key))


def trend_alerts(key: str, series: Series) -> list[Alert]:
    """Return an alert if a quantity rises above the line of log(value) against log(tokens) of its first half."""
    usable = np.isfinite(series.values) & (series.values > 0) & (series.tokens > 0)
    count = int(usable.sum())
    x, y, steps = np.log(series.tokens[usable]), np.log(series.values[usable]), series.steps[usable]
    if count < MIN_OBSERVATIONS or x[0] == x[count // 2 - 1]:
        return []
    expected, error = _extrapolate(x, y, count // 2)
    limit = expected + np.maximum(TREND_ERRORS * error, math.log(TREND_FACTOR))
    above = y > limit
    above[: count // 2] = False
    lasting = np.convolve(above, np.ones(IN_A_ROW), "valid") == IN_A_ROW
    if not lasting.any():
        return []
    first = int(lasting.argmax())
    message = f"{math.exp(y[first]):.3g} where its trend so far gives {math.exp(expected[first]):.3g}"
    return [Alert("trend", key, int(steps[first]), message)]


def _extrapolate(x: Floats, y: Floats, fitted: int) -> tuple[Floats, Floats]:
    """Return the least-squares line through the first `fitted` points at all x, and its prediction error."""
    start, known = x[:fitted], y[:fitted]
    spread = float(np.square(start - start.mean()).sum())
    slope = float(((start - start.mean()) * known).sum()) / spread
    expected = known.mean() + slope * (x - start.mean())
    deviation = math.sqrt(float(np.square(known - expected[:fitted]).sum()) / (fitted - 2))
    return expected, deviation * np.sqrt(1 + 1 / fitted + np.square(x - start.mean()) / spread)


def loss_spikes(series: Series) -> list[Alert]:
    """Return an alert for each sequence of steps whose loss is far above the median of those before."""
    alerts: list[Alert] = []
    values, inside = series.values, False
    for index in range(SPIKE_WINDOW, len(values)):
        before = values[index - SPIKE_WINDOW : index]
        if not np.isfinite([*before, values[index]]).all():
            continue
        usual, limit = usual_range(before.tolist(), SPIKE_DEVIATIONS, SPIKE_NATS)
        spike = bool(values[index] > limit)
        if spike and not inside:
            step = int(series.steps[index])
            alerts.append(Alert("loss_spike", "loss", step, f"{values[index]:.4f} after a median of {usual:.4f}"))
        inside = spike
    return alerts


def _diverged(history: History, vocab_size: int | None) -> list[Alert]:
    """Return an alert if a complete run ended with a loss above that of guessing."""
    if vocab_size is None or not history.complete:
        return []
    message = worse_than_guessing(float(history.series["loss"].values[-1]), vocab_size)
    return [] if message is None else [Alert("diverged", "loss", int(history.series["loss"].steps[-1]), message)]


def _non_finite(history: History) -> list[Alert]:
    alerts = []
    for key, series in history.series.items():
        bad = ~np.isfinite(series.values)
        if bad.any():
            first = int(bad.argmax())
            message = f"{series.values[first]}; {int(bad.sum())} of {len(bad)} values are not finite"
            alerts.append(Alert("non_finite", key, int(series.steps[first]), message))
    return alerts


def _skipped(history: History) -> list[Alert]:
    if not history.skipped:
        return []
    message = f"{len(history.skipped)} logged update(s) skipped: the gradient was not finite"
    return [Alert("skipped", "grad_norm", history.skipped[0], message)]


def _size_alerts(key: str, series: Series) -> list[Alert]:
    """Return an alert for the first update whose size differs from the base run's."""
    with np.errstate(divide="ignore"):  # an update of size 0 is outside as well
        outside = np.abs(np.log(series.values)) > math.log(SIZE_FACTOR)
    if not outside.any():
        return []
    first = int(outside.argmax())
    return [Alert("size", key, int(series.steps[first]), f"{series.values[first]:.3g} times that of the base run")]
