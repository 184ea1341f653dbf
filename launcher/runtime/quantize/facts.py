"""Collect what a precision law needs to know about a checkpoint: size, data, learning rate, training precision."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.models.open import LoadedModel, beside
from plumbline.launcher.runtime.optim.schedule import Schedule
from plumbline.launcher.runtime.run.folder import read_result
from plumbline.launcher.runtime.run.status_file import RESULT

Phase = Literal["warm-up", "peak", "decay"]
GRIDS = ("_scale", "_zero_point", "_shape")  # suffixes of a quantized folder's tensors besides its weights


@dataclass(frozen=True)
class CheckpointFacts:
    """Hold the facts that do not depend on the recipe; None for those that a Hugging Face folder lacks."""

    model: str
    """Folder of the weights."""
    run: str
    """Name of the same weights in a sweep if they are a run's final ones, else the folder."""
    average: str | None
    """Which average the weights are, in words, or None for the weights of one step."""
    step: int | None
    parameters: int
    """N: without embedding and head."""
    tokens: int | None
    """D, seen in training."""
    tokens_per_parameter: float | None
    """D / N."""
    lr: float | None = None
    """Peak learning rate."""
    lr_phase: Phase | None = None
    lr_factor: float | None = None
    """Learning rate of the last update relative to the peak."""
    weight_bits: int | None = None
    """Bits of the weights in training, like `activation_bits` and `kv_bits`; 16: not rounded."""
    activation_bits: int | None = None
    kv_bits: int | None = None


def checkpoint_facts(model: LoadedModel) -> CheckpointFacts:
    """Return the facts of a model, from its run or only from its weights."""
    config = model.config
    parameters = _non_embedding(model.module) if config is None else totals(plan_run(config).rows).non_embedding
    facts = CheckpointFacts(
        model=str(model.source),
        run=_run(model),
        average=model.average,
        step=model.step,
        parameters=parameters,
        tokens=model.tokens,
        tokens_per_parameter=model.tokens / parameters if model.tokens is not None else None,
    )
    if config is None or model.tokens is None or model.step is None:
        return facts
    schedule, bits = plan_run(config).schedule, config.precision.training_bits
    last = schedule.batch_plan.tokens_before(max(0, model.step - 1))  # consumed when the last update was made
    return replace(
        facts,
        lr=config.optimizer.lr,
        lr_phase=_phase(schedule, model.tokens),
        lr_factor=schedule.factor(last),
        weight_bits=bits["weight_bits"],
        activation_bits=bits["activation_bits"],
        kv_bits=bits["kv_bits"],
    )


def _non_embedding(stock: Any) -> int:
    """Return the parameters of a stock model without embedding and head, as they are counted for a run."""
    outside = [stock.get_output_embeddings(), *(each for each in stock.modules() if isinstance(each, nn.Embedding))]
    left_out = {id(parameter) for module in outside for parameter in module.parameters()}
    named = stock.named_parameters()
    return sum(each.numel() for name, each in named if id(each) not in left_out and not name.endswith(GRIDS))


def _run(model: LoadedModel) -> str:
    """Return the name of the same weights in a sweep if they are a run's final ones, else the folder."""
    folder = model.config.run.folder if model.config is not None else None
    own = beside(model.source, RESULT)  # a run that was moved may have another one in its old place
    is_there = folder is not None and own is not None and (folder / RESULT).is_file() and own.samefile(folder / RESULT)
    result = read_result(model.config) if is_there and model.config is not None else None
    ended = result is not None and result["step"] == model.step
    return (str(folder) if ended else str(model.source)) + (f", {model.average}" if model.average else "")


def _phase(schedule: Schedule, tokens: int) -> Phase:
    """Return the phase of the schedule after `tokens` tokens."""
    if tokens <= schedule.warmup_end:
        return "warm-up"
    return "peak" if tokens <= schedule.decay_start else "decay"
