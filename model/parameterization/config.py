"""Define the `parameterization` section, and the optimizer settings that its table scales."""

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

MatrixUpdate = Literal["elementwise", "orthogonal"]
OWN_FACTORS = ("lr_multipliers", "weight_decay_multipliers", "init_multipliers", "eps_multipliers")
"""Keys of the section with a user's own factors, by role or name."""


class ParameterizationConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Choose the rule that scales the hyperparameters, and the base model at which they were tuned."""

    rule: Literal["sp", "mup", "depth_alpha", "completep"] = "completep"
    """How initialisation, learning rate, decay and eps scale. sp (standard parameterization): not at all; mup: with
    width; depth_alpha: with width and depth; completep: depth_alpha with exponent 1."""
    base_hidden_size: PositiveInt | None = None
    """Width at which the hyperparameters were tuned. Needed by every rule but sp."""
    base_num_hidden_layers: PositiveInt | None = None
    """Depth at which they were tuned. Needed by depth_alpha and completep."""
    base_head_dim: PositiveInt | None = None
    """Head width at which they were tuned. None: the model's own head_dim (scale the number of heads instead)."""
    base_num_attention_heads: PositiveInt | None = None
    """Query heads of the base. None: heads x head_dim grew in proportion to hidden_size."""
    base_num_key_value_heads: PositiveInt | None = None
    """Key and value heads of the base. None: heads x head_dim grew in proportion to hidden_size."""
    base_intermediate_size: PositiveInt | None = None
    """Inner width of the base's MLP. None: it grew in proportion to hidden_size."""
    depth_alpha: PositiveFloat = 1.0
    """Exponent of the residual multiplier m_L^-alpha. CompleteP fixes it at 1. Below 1 the learning rate of hidden
    matrices falls as m_L^(alpha - 1) and their decay stays, so their lr x decay falls, too; weight_decay_multipliers
    for hidden_matrix can make up for it."""
    gamma_0: PositiveFloat = 1.0
    """Richness: divides the logits. Small is lazy (features hardly move), large is rich. Far below 1, set
    zero_init_output: the initial logits are divided by it as well."""
    embedding_multiplier: PositiveFloat = 1.0
    """Multiplies the embedding's output; tunable, does not scale."""
    output_multiplier: PositiveFloat = 1.0
    """Multiplies the logits, in addition to the factor 1/m_N; tunable."""
    output_scaling: Literal["forward", "absorbed"] = "forward"
    """Where the unembedding's 1/m_N is applied: to the logits, or to its initial weights and learning rate
    (Complete(d)P), so that the logits are a plain matrix product. Both train alike if weight_decay_width_exponent is
    1; a tied unembedding allows only forward."""
    scaled_branch_init: bool = False
    """Scale the initial values of the matrices that end a branch by (number of branches)^-1/2, as GPT-2 does. This is
    the standard parameterization's remedy for depth, so it is only for rules that do not scale with depth."""
    zero_init_output: bool = False
    """Initialise the unembedding, and so the logits, to zero. Not for a tied one."""
    lr_multipliers: dict[str, PositiveFloat] = {}
    """Your own learning-rate factors per module: role (`unembedding`) or regular expression over whole parameter names
    (`.*down_proj.weight`) -> factor. If several match a tensor, they multiply."""
    weight_decay_multipliers: dict[str, NonNegativeFloat] = {}
    """Factors for weight decay, per module as in lr_multipliers; 0 disables it for a module."""
    init_multipliers: dict[str, NonNegativeFloat] = {}
    """Factors for the standard deviation of the first values, per module as in lr_multipliers."""
    eps_multipliers: dict[str, PositiveFloat] = {}
    """Factors for AdamW's eps, per module as in lr_multipliers."""
    weight_decay_width_exponent: NonNegativeFloat = 1.0
    """x: the weight decay of hidden matrices grows as m_N^x where their learning rate falls as 1/m_N. 1 keeps lr x
    decay over width, and so the time scale of forgetting; 0.5 is arXiv 2510.15262; 0 leaves the decay unchanged."""
    hidden_init_gain: PositiveFloat | None = None
    """Initialise hidden matrices with standard deviation gain / sqrt(fan-in) instead of model.initializer_range, whose
    gain of 0.02 sqrt(fan-in) differs between bases (0.11 at width 32). None: initializer_range."""

    @property
    def scales_width(self) -> bool:
        """Return whether the rule scales with width."""
        return self.rule != "sp"

    @property
    def scales_depth(self) -> bool:
        """Return whether the rule scales with depth."""
        return self.rule in ("depth_alpha", "completep")

    @model_validator(mode="after")
    def _check(self) -> "ParameterizationConfig":
        if self.scales_width and self.base_hidden_size is None:
            raise ValueError(f"rule: {self.rule} needs base_hidden_size, the width at which lr was tuned")
        if self.scales_depth and self.base_num_hidden_layers is None:
            raise ValueError(f"rule: {self.rule} needs base_num_hidden_layers, the depth at which lr was tuned")
        if self.rule == "completep" and self.depth_alpha != 1.0:
            raise ValueError(f"depth_alpha = {self.depth_alpha}: completep fixes it at 1; use rule: depth_alpha")
        if not self.scales_depth and self.depth_alpha != 1.0:
            raise ValueError(
                f"depth_alpha = {self.depth_alpha}: rule: {self.rule} does not scale with depth; use rule: depth_alpha"
            )
        if self.scales_depth and self.scaled_branch_init:
            raise ValueError(f"scaled_branch_init = true with rule: {self.rule} would scale branches with depth twice")
        for quantity in OWN_FACTORS:
            for key in getattr(self, quantity):
                try:
                    re.compile(key)
                except re.error as error:
                    raise ValueError(
                        f"parameterization.{quantity}: {key!r} is not a regular expression: {error}"
                    ) from None
        return self


@dataclass(frozen=True)
class OptimizerSettings:
    """Hold the hyperparameters that were tuned at the base and that the table scales."""

    lr: float
    """Peak learning rate."""
    weight_decay: float
    eps: float
    betas: tuple[float, float] = (0.9, 0.95)
    """Not scaled with width or depth."""
    matrix_update: MatrixUpdate = "elementwise"
    """What the optimizer normalises to size 1 in a hidden matrix's update: entries (AdamW) or singular values
    (Muon)."""
