"""Show the samples of a step of a run, for programs and for people."""

from plumbline.launcher.runtime.inspection.seen import SeenRun, Step
from plumbline.launcher.runtime.inspection.text import Answer, sample_lines

SHOWN = 8
"""Samples of a step to show; if they are scored, those whose worst tokens are shown."""


def tell_step(run: SeenRun, step: Step, full: bool) -> Answer:
    """Show the samples of a step; all of them, uncut, if `full`."""
    lines = [heading(run, step)]
    shown = step.samples if full else step.samples[:SHOWN]
    for sample in shown:
        lines.extend(sample_lines(sample, run.decoders[sample.source], full))
    if len(shown) < len(step.samples):
        lines.append(f"... {len(step.samples) - len(shown):,} more samples (--full)")
    facts = {
        "run": str(run.folder),
        "step": step.step,
        "rank": step.rank,
        "recorded_loss": step.loss,
        "samples": [sample.facts(run.decoders[sample.source]) for sample in step.samples],
    }
    return facts, lines


def heading(run: SeenRun, step: Step) -> str:
    """Return which samples a step has, and whether it has been made."""
    rank = "" if step.rank is None else f" on rank {step.rank}"
    numbers = [sample.number for sample in step.samples if sample.number is not None]
    when = "trained" if step.step <= run.last_step else "will train"
    recorded = "" if step.loss is None else f"; its loss in metrics.jsonl is {step.loss:.4f}"
    return (
        f"step {step.step} of {run.folder}{rank}: {len(numbers)} samples from {min(numbers)} to {max(numbers)}, "
        f"on which update {step.step} {when}{recorded}"
    )
