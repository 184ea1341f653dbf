"""Collect what a law of precision needs to know of a checkpoint: size, data, learning rate, training precision."""

from typing import Any

from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.models.open import LoadedModel
from plumbline.launcher.runtime.run.folder import read_result
from plumbline.model.quantization.post_training.calibration import decoder_blocks

GRIDS = ("_scale", "_zero_point", "_shape")  # what a quantized folder has beside its weights


def checkpoint_facts(model: LoadedModel) -> dict[str, Any]:
    """Return the columns of a row that do not depend on the recipe; None where a Hugging Face folder does not say.

    parameters          N: without embedding and head
    tokens              D, seen in training
    tokens_per_parameter  D / N
    lr_phase, lr_factor   warm-up, peak or decay; the last update's rate over the peak
    weight_bits, activation_bits, kv_bits   in training, 16 for what was not rounded
    """
    config = model.config
    if config is not None:
        parameters = totals(plan_run(config).rows).non_embedding
    else:
        named = decoder_blocks(model.module)[1].named_parameters()
        parameters = sum(parameter.numel() for name, parameter in named if not name.endswith(GRIDS))
    facts: dict[str, Any] = {
        "model": str(model.source),
        "run": _run(model),
        "average": model.average,
        "step": model.step,
        "parameters": parameters,
        "tokens": model.tokens,
        "tokens_per_parameter": model.tokens / parameters if model.tokens is not None else None,
        "lr": None,
        "lr_phase": None,
        "lr_factor": None,
        "weight_bits": None,
        "activation_bits": None,
        "kv_bits": None,
    }
    if config is not None and model.tokens is not None and model.step is not None:
        facts |= {
            "lr": config.optimizer.lr,
            **_learning_rate(config, model.step, model.tokens),
            **config.precision.training_bits,
        }
    return facts


def _run(model: LoadedModel) -> str:
    """Return what a sweep calls the same weights, if they are those that a run ended with."""
    folder = model.config.run.folder if model.config is not None else None
    result = None if folder is None or model.config is None else read_result(model.config)
    ended = result is not None and result["step"] == model.step
    return (str(folder) if ended else str(model.source)) + (f", {model.average}" if model.average else "")


def _learning_rate(config: Config, step: int, tokens: int) -> dict[str, Any]:
    """Return where on its schedule a run is after `step` steps."""
    schedule = plan_run(config).schedule
    last = schedule.plan.tokens_before(max(0, step - 1))  # consumed when the last update was made
    if tokens <= schedule.warmup_end:
        phase = "warm-up"
    elif tokens <= schedule.decay_start:
        phase = "peak"
    else:
        phase = "decay"
    return {"lr_phase": phase, "lr_factor": schedule.factor(last)}
