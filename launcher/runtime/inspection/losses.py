"""Score the samples of a step one by one, to find which samples and tokens cause its loss."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from plumbline.data.streams import IGNORED
from plumbline.data.tokenizers import Decoder
from plumbline.data.windows import Batch
from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.inspection.seen import SeenRun, Step
from plumbline.launcher.runtime.inspection.steps import SHOWN, heading
from plumbline.launcher.runtime.inspection.text import Answer, sample_lines
from plumbline.launcher.runtime.models.open import LoadedModel

WORST = 5
"""Most tokens to name per sample."""


@dataclass(frozen=True)
class WorstToken:
    """Hold a token that was predicted badly."""

    position: int
    """Position in the sample of the token before it."""
    token: int
    nats: float


@dataclass(frozen=True)
class SampleLoss:
    """Hold a model's score on one sample."""

    sample: int
    loss: float
    """Mean cross-entropy over its labels, nats per token."""
    labels: int
    """Number of labels."""
    worst: list[WorstToken]
    """The tokens with the highest loss, worst first."""


def checkpoint_before(run: SeenRun, step: int) -> Path:
    """Return the newest whole checkpoint at or before the weights from which a step started.

    Raises:
        ValueError: there is no such checkpoint.
    """
    root = run.folder / CHECKPOINTS
    there = checkpoint.checkpoints(root)
    before = [folder for folder in there if checkpoint.step_of(folder) < step]
    newest = checkpoint.newest_whole(before, checkpoint.problems)
    if newest is None:
        steps = ", ".join(str(checkpoint.step_of(folder)) for folder in reversed(there)) or "none"
        raise ValueError(
            f"--loss of step {step}: {root} holds no whole checkpoint of a step before it (it has {steps}); give "
            "another with --checkpoint, or keep more with checkpoint.keep_last and checkpoint.keep_every"
        )
    return newest


def sample_losses(model: LoadedModel, step: Step) -> list[SampleLoss]:
    """Return a model's next-token cross-entropy on each sample of a step, worst first."""
    losses = [_score(model, batch, row) for batch in step.batches for row in range(len(batch["sample_index"]))]
    return sorted(losses, key=lambda its: its.loss, reverse=True)


def mean_loss(losses: list[SampleLoss]) -> float:
    """Return the mean over all labels, which is what training reports for a step."""
    return sum(its.loss * its.labels for its in losses) / sum(its.labels for its in losses)


def tell_losses(run: SeenRun, step: Step, model: LoadedModel, full: bool) -> Answer:
    """Score the samples of a step, and show the worst (all if `full`) with their worst tokens."""
    losses = sample_losses(model, step)
    samples = {sample.number: sample for sample in step.samples}
    lines = [heading(run, step), f"by {model.source}: {mean_loss(losses):.4f} nats over all labels"]
    for number, its in enumerate(losses):
        sample = samples[its.sample]
        decoder = run.decoders[sample.source]
        lines.append(f"{its.loss:9.4f}  sample {its.sample}  {sample.source}, window {sample.window}")
        if number < SHOWN or full:
            lines.extend(
                f"  {worst.nats:9.4f}  token {worst.position + 1}: {_written(decoder, [worst.token])} after "
                f"{_written(decoder, sample.tokens[max(0, worst.position - 7) : worst.position + 1])}"
                for worst in its.worst
            )
    worst_sample = samples[losses[0].sample]
    lines.append("the worst one:")
    lines.extend(sample_lines(worst_sample, run.decoders[worst_sample.source], full))
    facts = {
        "run": str(run.folder),
        "step": step.step,
        "rank": step.rank,
        "checkpoint": str(model.source),
        "checkpoint_step": model.step,
        "loss": mean_loss(losses),
        "recorded_loss": step.loss,
        "samples": [
            {**samples[its.sample].facts(run.decoders[samples[its.sample].source]), **asdict(its)} for its in losses
        ],
    }
    return facts, lines


def _written(decoder: Decoder | None, tokens: Sequence[int]) -> str:
    """Return some tokens in one line: their text in quotes, or their ids."""
    return " ".join(map(str, tokens)) if decoder is None else repr(decoder(tokens))


def _score(model: LoadedModel, batch: Batch, row: int) -> SampleLoss:
    """Score a single row, so that memory only holds its logits."""
    tensors: dict[str, Any] = {**batch}
    alone = {name: tensor[row : row + 1] for name, tensor in tensors.items()}
    logits = model.logits(alone)[0]
    labels = alone["labels"][0].to(logits.device)
    nats = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none").double()
    count = int((labels != IGNORED).sum())
    worst, places = nats.topk(min(WORST, count))
    return SampleLoss(
        sample=int(alone["sample_index"].item()),
        loss=float(nats.sum()) / max(1, count),
        labels=count,
        worst=[
            WorstToken(place, int(labels[place]), cost)
            for place, cost in zip(places.tolist(), worst.tolist(), strict=True)
        ],
    )
