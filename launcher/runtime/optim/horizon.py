"""Transfer hyperparameters tuned at one batch size and training length to another.

    m_B = batch tokens / base batch tokens        m_D = training tokens / base training tokens

This is a separate layer on top of the parameterization: width and depth rules follow from theory, but the published
exponents for batch size and horizon disagree, so each rule is a choice and none is the default. Rules:

- complete_dp: AdamW's SDE limit (Complete(d)P, arXiv 2512.22382). lr and weight_decay x sqrt(m_B / m_D), eps x
  sqrt(m_D / m_B), 1 - beta x m_B / m_D. It keeps lr x weight_decay x steps, and so AdamW's timescale, constant.
- power_law: lr x m_B^lr_batch_exponent x m_D^lr_tokens_exponent (-0.32 is the horizon exponent of arXiv 2409.19913).

Weight decay may be given as AdamW's timescale tau = 1 / (lr x weight_decay x steps), the fraction of a run over which
the weights forget (Power Lines, arXiv 2505.13738), held constant or falling as tokens per parameter rise.
"""

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, PositiveFloat, PositiveInt, model_validator

from plumbline.launcher.runtime.optim.optimizer import OptimizerConfig
from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.config import OptimizerSettings
from plumbline.model.parameterization.skeleton import parameter_count

READ_BY: dict[str, tuple[str, ...]] = {
    "base_batch_tokens": ("complete_dp", "power_law"),
    "base_tokens": ("complete_dp", "power_law"),
    "lr_batch_exponent": ("power_law",),
    "lr_tokens_exponent": ("power_law",),
}
"""Key of the section -> the rules that read it."""


class HorizonConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Choose the rules for batch size and training length, and the base at which the hyperparameters were tuned."""

    rule: Literal["none", "complete_dp", "power_law"] = "none"
    """How lr, betas, eps and weight_decay depend on batch size and length. none: not at all; complete_dp: by the SDE of
    Complete(d)P; power_law: by the exponents below (docs/parameterization.md)."""
    base_batch_tokens: PositiveInt | None = None
    """Tokens of one global batch at which the hyperparameters were tuned. Needed by every rule but none."""
    base_tokens: PositiveInt | None = None
    """Training tokens for which the hyperparameters were tuned. Needed by every rule but none."""
    lr_batch_exponent: float = 0.5
    """For `rule: power_law`: exponent of (batch / base_batch_tokens) in the learning rate."""
    lr_tokens_exponent: float = -0.32
    """For `rule: power_law`: exponent of (training tokens / base_tokens) in the learning rate."""
    tau: PositiveFloat | None = None
    """AdamW's timescale 1 / (lr x weight_decay) as a fraction of the run, which sets the weight decay instead of
    optimizer.weight_decay. None: optimizer.weight_decay is used. It holds at the base's values: a module whose lr x
    decay the parameterization changes (hidden matrices at depth_alpha < 1, lr_multipliers) has another."""
    tau_exponent: float = 0.0
    """Exponent x by which tau grows as (tokens per parameter / base_tokens_per_parameter)^x. 0: constant; Power Lines
    found -0.527."""
    base_tokens_per_parameter: PositiveFloat | None = None
    """Tokens per parameter at which tau was tuned. Needed when tau_exponent is not 0."""

    @property
    def is_plain(self) -> bool:
        """Return whether the optimizer's settings are used as they are."""
        return self.rule == "none" and self.tau is None

    def cautions(self) -> Iterator[str]:
        """Yield a sentence for each key that has a value of its own but no effect."""
        for key, rules in READ_BY.items():
            value = getattr(self, key)
            if value != HorizonConfig.model_fields[key].default and self.rule not in rules:
                yield (
                    f"horizon.{key} = {value:g} has no effect: horizon.rule = {self.rule}; leave it out, or set "
                    f"horizon.rule to {' or '.join(rules)}"
                )

    @model_validator(mode="after")
    def _check(self) -> "HorizonConfig":
        if self.rule != "none":
            for key in ("base_batch_tokens", "base_tokens"):
                if getattr(self, key) is None:
                    raise ValueError(f"rule: {self.rule} needs {key}, the value at which lr was tuned")
        if self.tau_exponent and (self.tau is None or self.base_tokens_per_parameter is None):
            raise ValueError(f"tau_exponent = {self.tau_exponent} needs tau and base_tokens_per_parameter")
        return self


def scale_settings(
    optimizer: OptimizerConfig, horizon: HorizonConfig, model: ModelConfig, batch_tokens: int, steps: int, tokens: int
) -> OptimizerSettings:
    """Return the optimizer's base values for a run of `tokens` in `steps` with a full batch of `batch_tokens`.

    Raises:
        ValueError: the rule is not for this optimizer; it would make a beta negative, because the batch is too large
            for this horizon; or an exponent makes lr or weight decay overflow or underflow.
    """
    if horizon.rule == "complete_dp" and not optimizer.kind.keeps_sde:
        raise ValueError(
            f"horizon: rule complete_dp is the limit of AdamW, and optimizer.name is {optimizer.name}: use power_law"
        )
    try:
        settings = _scaled(optimizer, horizon, model, batch_tokens, steps, tokens)
    except (OverflowError, ZeroDivisionError):
        settings = None
    if settings is None or not math.isfinite(settings.lr * settings.weight_decay):
        raise ValueError(
            f"horizon: lr_batch_exponent = {horizon.lr_batch_exponent}, lr_tokens_exponent = "
            f"{horizon.lr_tokens_exponent}, tau_exponent = {horizon.tau_exponent}: they make the learning rate or "
            "the weight decay too large for a number; published exponents lie between -1 and 1"
        )
    return settings


def _scaled(
    optimizer: OptimizerConfig, horizon: HorizonConfig, model: ModelConfig, batch_tokens: int, steps: int, tokens: int
) -> OptimizerSettings:
    lr, weight_decay, eps = optimizer.lr, optimizer.weight_decay, optimizer.eps
    betas = (optimizer.betas[0], optimizer.betas[1])
    if horizon.rule != "none":
        assert horizon.base_batch_tokens is not None, "HorizonConfig checks that both are given"
        assert horizon.base_tokens is not None, "HorizonConfig checks that both are given"
        m_b, m_d = batch_tokens / horizon.base_batch_tokens, tokens / horizon.base_tokens
        if horizon.rule == "complete_dp":
            factor = math.sqrt(m_b / m_d)
            lr, weight_decay, eps = lr * factor, weight_decay * factor, eps / factor
            betas = (_beta(betas[0], m_b / m_d), _beta(betas[1], m_b / m_d))
        else:
            lr *= m_b**horizon.lr_batch_exponent * m_d**horizon.lr_tokens_exponent
    if horizon.tau is not None:
        tau = horizon.tau
        if horizon.base_tokens_per_parameter is not None:
            tau *= (tokens / parameter_count(model) / horizon.base_tokens_per_parameter) ** horizon.tau_exponent
        weight_decay = 1 / (tau * lr * steps)
    return OptimizerSettings(lr, weight_decay, eps, betas, optimizer.kind.matrix_update)


def _beta(base: float, ratio: float) -> float:
    """Return beta with 1 - beta scaled; exactly the base when there is nothing to scale."""
    beta = base if ratio == 1 else 1 - (1 - base) * ratio
    if beta < 0:
        raise ValueError(
            f"horizon: rule complete_dp turns beta {base} into {beta:.3g} at m_B / m_D = {ratio:.3g}: the batch is "
            "too large for this horizon. Lower data.global_batch_size or use rule: power_law"
        )
    return beta
