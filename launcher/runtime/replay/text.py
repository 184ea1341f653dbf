"""Report the result of a replay, for people and for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from plumbline.data.tokenizers import Decoder
from plumbline.launcher.runtime.inspection.samples import Sample
from plumbline.launcher.runtime.inspection.text import sample_lines
from plumbline.launcher.runtime.replay.record import RunRecord
from plumbline.launcher.runtime.replay.spike import Explanation, Standing
from plumbline.launcher.runtime.replay.windows import Verification

Decoded = Sequence[tuple[Sample, Decoder | None]]
"""Samples, each with the decoder of its tokens."""


def promise_of(tolerance: float | None) -> str:
    """Return the promised accuracy of numbers that these ranks recompute, in words."""
    if tolerance is None:
        return "to the last bit"
    return f"up to the order of summation: on another number of ranks samples are exact, numbers within {tolerance:.1%}"


def verify_lines(found: Verification, wanted: int) -> Iterator[str]:
    """Yield lines on what was compared, and the result; `wanted` windows were requested."""
    chain, kept = found.record.chain, len(found.record.checkpoints)
    steps = f"steps {min(chain.steps)} to {max(chain.steps)}" if chain.steps else "no steps"
    yield f"chain    {steps}, {len(chain.checkpoints)} checkpoints; last hash {chain.head}"
    count = f"{len(found.contradictions) or 'no'} contradictions"
    yield f"records  {len(found.record.logged)} lines of metrics.jsonl, {kept} checkpoints on disk: {count}"
    for difference in found.contradictions:
        yield f"         step {difference}"
    for its in found.verdicts:
        end = "" if its.window.end is None else ", weights and optimizer state at the end"
        yield f"window   {its.window}: samples, losses, norms{end}; {promise_of(its.tolerance)}"
        if its.difference is not None:
            yield f"         {its.steps} steps are as written; step {its.difference}"
    for window in found.left_out:
        yield f"left out {window}: a later start changed what is trained, and their configuration is kept nowhere"
    if len(found.verdicts) < wanted and not found.left_out:
        kept_by = "checkpoint.keep_last and keep_every say which checkpoints stay"
        yield f"         no more than {len(found.verdicts)} can be computed again: {kept_by}"
    first = found.first
    if first is not None:
        yield f"DIFFERS  from step {first.step} on, in {first.quantity}"
    elif _verdict(found) == "verified":
        yield "verified"
    else:
        yield "the records agree with each other, but no step was computed again"


def _verdict(found: Verification) -> str:
    """Return differs, verified, or consistent if no step was computed again."""
    if found.first is not None:
        return "differs"
    return "verified" if found.verdicts else "consistent"


def verify_facts(found: Verification) -> dict[str, Any]:
    """Return the same facts for programs."""
    first, chain = found.first, found.record.chain
    return {
        "run": str(found.record.folder),
        "verdict": _verdict(found),
        "first": None if first is None else asdict(first),
        "head": chain.head,
        "steps": len(chain.steps),
        "checkpoints": sorted(chain.checkpoints),
        "contradictions": [asdict(each) for each in found.contradictions],
        "windows": [
            {
                "first": its.window.first,
                "last": its.window.last,
                "begin": None if its.window.begin is None else str(its.window.begin),
                "end": None if its.window.end is None else str(its.window.end),
                "tolerance": its.tolerance,
                "steps": its.steps,
                "difference": None if its.difference is None else asdict(its.difference),
            }
            for its in found.verdicts
        ],
        "left_out": [{"first": window.first, "last": window.last} for window in found.left_out],
    }


def standing_lines(step: int, found: Sequence[Standing]) -> Iterator[str]:
    """Yield lines that compare the numbers of a step with those around it."""
    for its in found:
        usual = f"usual {its.usual.median:.4g}, a spike above {its.usual.limit:.4g}"
        yield f"step {step}: {its.quantity} {its.value:.4g}; {usual}"


def spike_lines(
    record: RunRecord, step: int, standing: Sequence[Standing], its: Explanation, causes: Decoded, full: bool
) -> Iterator[str]:
    """Yield lines on the samples that caused a spike, their text (uncut if `full`), and the steps without them."""
    yield from standing_lines(step, standing)
    ahead = f"{its.window}, then step {step}" if its.window.last > its.window.first else f"step {step}"
    yield f"made again: {ahead}; {promise_of(its.tolerance)}"
    if its.difference is not None:
        yield f"  but not what the run wrote is step {its.difference}"
    yield f"{len(its.found.causes)} samples found in {its.found.tests} replays of the step"
    for sample, decoder in causes:
        yield from sample_lines(sample, decoder, full)
    yield "without them, beside what the run wrote:"
    for made in its.proof:
        written = record.written(made.step)
        assert written is not None, "only steps that were written are made"
        yield (
            f"  step {made.step}: loss {made.loss:.4f} ({written.loss:.4f})  "
            f"grad_norm {made.grad_norm:.4g} ({written.grad_norm:.4g})"
        )
    if its.difference is not None and not its.found.causes:
        yield "what is computed again is not what the run wrote, so its samples are not to blame: --verify says more"
    elif not its.found.explained:
        yield f"that is a spike still: no single sample of step {step} is to blame; look at the steps before"


def spike_facts(record: RunRecord, step: int, spike: Standing, its: Explanation, causes: Decoded) -> dict[str, Any]:
    """Return the same facts for programs."""
    return {
        "run": str(record.folder),
        "step": step,
        "spike": asdict(spike),
        "tolerance": its.tolerance,
        "difference": None if its.difference is None else asdict(its.difference),
        "causes": its.found.causes,
        "explained": its.found.explained,
        "tests": its.found.tests,
        "without": [asdict(made) for made in its.proof],
        "samples": [sample.facts(decoder) for sample, decoder in causes],
    }
