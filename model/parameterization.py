"""The parameterization, as a table: how init, learning rate, weight decay, eps and the forward pass scale with size.

    m_N = hidden_size / base_hidden_size              width multiplier
    m_L = num_hidden_layers / base_num_hidden_layers  depth multiplier
    a   = depth_alpha                                 1 is CompleteP, 0.5 is depth-muP

Source: Table 1 of CompleteP (arXiv 2505.01618), with these additions:

- AdamW's eps outside the blocks shrinks with the gradient (1/m_N: Complete(d)P, arXiv 2512.22382, for the embedding;
  the same argument gives the final norm and the unembedding). The gains of QK-norm sum their gradient over all heads,
  so their eps does not scale with width.
- The attention scale is written so that it equals 1/sqrt(head_dim) to the last bit at the base.
- Where shapes do not grow in one proportion, each hidden matrix scales with its own fans: init and learning rate with
  the ratio of its fan-in, eps with that of its fan-out (the gradient of one unit of a layer of n shrinks as 1/n).
- An optimizer that orthogonalises (Muon) moves a matrix by a fixed spectral norm; the spectral condition (arXiv
  2310.17813: update norm ~ sqrt(fan_out / fan_in)) then takes the place of the 1/fan_in of AdamW.

The role of a tensor follows from its *name*, never from its shape (ZeRO-3 shows empty shapes), and the table from the
configuration alone, so the same rows serve `plan.py`, the initialisation and the optimizer's groups. Weight decay is in
PyTorch's coupled convention: a step decays by lr * weight_decay.
"""

import functools
import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, PositiveFloat, PositiveInt, model_validator

from model.config import ModelConfig
from model.decoder import CausalLM
from model.initialization import first_std, first_value, is_trainable
from model.multipliers import Multipliers
from model.objectives import ObjectiveConfig, make_objective
from model.objectives.objective import TrainedLM
from model.roles import Role, fans_of, role_of

MatrixUpdate = Literal["elementwise", "orthogonal"]


class ParameterizationConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Which rule scales the hyperparameters, and the base model at which they were tuned."""

    rule: Literal["sp", "mup", "depth_alpha", "completep"] = "completep"
    """Standard parameterization (nothing scales), muP (width), depth-alpha (width and depth), CompleteP (alpha = 1)."""
    base_hidden_size: PositiveInt | None = None
    """Width at which the hyperparameters were tuned. Needed by every rule but sp."""
    base_num_hidden_layers: PositiveInt | None = None
    """Depth at which they were tuned. Needed by depth_alpha and completep."""
    base_head_dim: PositiveInt | None = None
    """Head width at which they were tuned. Default: the model's own head_dim (scale the number of heads instead)."""
    base_num_attention_heads: PositiveInt | None = None
    """Query heads of the base. Default: heads x head_dim has grown in proportion to hidden_size."""
    base_num_key_value_heads: PositiveInt | None = None
    """Key and value heads of the base. Default: as above."""
    base_intermediate_size: PositiveInt | None = None
    """Inner width of the base's MLP. Default: it has grown in proportion to hidden_size."""
    depth_alpha: PositiveFloat = 1.0
    """Exponent of the residual multiplier m_L^-alpha. CompleteP fixes it at 1."""
    gamma_0: PositiveFloat = 1.0
    """Richness: divides the logits. Small is lazy (features hardly move), large is rich. Far below 1, set
    zero_init_output: the initial logits are divided by it as well."""
    embedding_multiplier: PositiveFloat = 1.0
    """Multiplies the embedding's output; tunable, does not scale."""
    output_multiplier: PositiveFloat = 1.0
    """Multiplies the logits; tunable, scaled by 1/m_N on top."""
    output_scaling: Literal["forward", "absorbed"] = "forward"
    """Where the unembedding's 1/m_N sits: on the logits, or in its initial weights and learning rate (Complete(d)P),
    so that the logits are a plain matrix product. The two train alike; a tied unembedding allows only forward."""
    zero_init_output: bool = False
    """Start the unembedding from zero, and so the logits. Not for a tied one."""
    lr_multipliers: dict[str, PositiveFloat] = {}
    """Extra learning-rate factors of your own, per module: role (`unembedding`) or regular expression over whole
    parameter names (`.*down_proj.weight`) -> factor. A tensor that several match takes their product."""

    @model_validator(mode="after")
    def _check(self) -> "ParameterizationConfig":
        if self.rule != "sp" and self.base_hidden_size is None:
            raise ValueError(f"rule: {self.rule} needs base_hidden_size, the width at which lr was tuned")
        if self.rule in ("depth_alpha", "completep") and self.base_num_hidden_layers is None:
            raise ValueError(f"rule: {self.rule} needs base_num_hidden_layers, the depth at which lr was tuned")
        if self.rule == "completep" and self.depth_alpha != 1.0:
            raise ValueError(f"depth_alpha = {self.depth_alpha}: completep fixes it at 1; use rule: depth_alpha")
        for key in self.lr_multipliers:
            try:
                re.compile(key)
            except re.error as error:
                raise ValueError(
                    f"parameterization.lr_multipliers: {key!r} is not a regular expression: {error}"
                ) from None
        return self


@dataclass(frozen=True)
class Sizes:
    """How much larger the model is than the base, and which part of the rule applies. All 1 under sp."""

    width: float
    """m_N: the residual stream."""
    depth: float
    """m_L; 1 where the rule has no depth part."""
    alpha: float
    """Depth exponent; 1 (which leaves every depth factor at 1) where the rule has no depth part."""
    query: float
    """Query heads x head_dim: output of q_proj, input of o_proj."""
    key_value: float
    """Key/value heads x head_dim: output of k_proj and v_proj."""
    intermediate: float
    """Inner width of the MLP."""

    @property
    def fixed(self) -> float:
        """What does not grow."""
        return 1.0


def sizes(model: ModelConfig, config: ParameterizationConfig) -> Sizes:
    """The ratios of `model` to the base, as the rule sees them."""
    if config.rule == "sp" or config.base_hidden_size is None:
        return Sizes(width=1.0, depth=1.0, alpha=1.0, query=1.0, key_value=1.0, intermediate=1.0)
    width = model.hidden_size / config.base_hidden_size
    depth = alpha = 1.0
    if config.rule in ("depth_alpha", "completep") and config.base_num_hidden_layers is not None:
        depth, alpha = model.num_hidden_layers / config.base_num_hidden_layers, config.depth_alpha
    head_dim = model.head_dim / (config.base_head_dim or model.head_dim)

    def ratio(size: int, base: int | None, head_dim: float = 1.0) -> float:
        return width if base is None else size / base * head_dim

    return Sizes(
        width=width,
        depth=depth,
        alpha=alpha,
        query=ratio(model.num_attention_heads, config.base_num_attention_heads, head_dim),
        key_value=ratio(model.num_key_value_heads, config.base_num_key_value_heads, head_dim),
        intermediate=ratio(model.intermediate_size, config.base_intermediate_size),
    )


def multipliers(model: ModelConfig, config: ParameterizationConfig) -> Multipliers:
    """The forward constants: attention logit scale, embedding, residual and output multipliers."""
    size = sizes(model, config)
    absorbed = config.output_scaling == "absorbed"
    base_head_dim = model.head_dim if config.rule == "sp" or config.base_head_dim is None else config.base_head_dim
    # 1/head_dim up to a constant, so that it is 1/sqrt(head_dim) exactly at the base
    attention = (1 / math.sqrt(model.head_dim)) * math.sqrt(base_head_dim / model.head_dim)
    if model.shaped_temperature is not None:
        attention /= model.shaped_temperature * math.sqrt(model.hidden_size)
    return Multipliers(
        attention=attention,
        embedding=config.embedding_multiplier,
        residual=size.depth**-size.alpha,
        output=config.output_multiplier / (config.gamma_0 * (1.0 if absorbed else size.width)),
    )


@dataclass(frozen=True)
class Scaling:
    """One row of the table: factors on the base values of init std, learning rate, weight decay and eps."""

    init_std: float
    lr: float
    weight_decay: float
    eps: float


def scaling_table(size: Sizes, fan_in: float, fan_out: float, matrix_lr: float, absorbed: bool) -> dict[Role, Scaling]:
    """Table 1 of CompleteP for one tensor; the factor 0 means "none" (norms, biases).

    Args:
        size: the model against the base.
        fan_in: ratio of this hidden matrix's fan-in to the base's; m_N where everything grows in one proportion.
        fan_out: the same of the fan-out, also of a bias.
        matrix_lr: what width does to a hidden matrix's learning rate.
        absorbed: the unembedding carries the logits' 1/m_N in its weights.
    """
    n, l, a = size.width, size.depth, size.alpha  # noqa: E741 - the paper's letters
    block_lr, block_eps = l ** (a - 1), l**-a
    return {
        #                        init std      lr                    weight decay   eps
        "embedding":     Scaling(1.0,          1.0,                  1.0,           1 / n),
        "hidden_matrix": Scaling(fan_in**-0.5, block_lr * matrix_lr, 1 / matrix_lr, block_eps / fan_out),
        "hidden_bias":   Scaling(0.0,          block_lr,             0.0,           block_eps / fan_out),
        "hidden_norm":   Scaling(0.0,          block_lr,             0.0,           block_eps / n),
        "hidden_scalar": Scaling(0.0,          block_lr,             0.0,           block_eps),
        "qk_norm":       Scaling(0.0,          block_lr,             0.0,           block_eps),
        "mixing":        Scaling(0.0,          0.0,                  0.0,           1.0),
        "projection":    Scaling(n**-0.5,      1 / n,                n,             1 / n),
        "final_norm":    Scaling(0.0,          1.0,                  0.0,           1 / n),
        "final_scalar":  Scaling(0.0,          1.0,                  0.0,           1.0),
        "unembedding":   Scaling(1 / n,        1 / n,                n,             1.0) if absorbed
                    else Scaling(1.0,          1.0,                  1.0,           1 / n),
    }  # fmt: skip


@dataclass(frozen=True)
class OptimizerSettings:
    """The hyperparameters tuned at the base, which the table scales."""

    lr: float
    """Peak learning rate."""
    weight_decay: float
    eps: float
    betas: tuple[float, float] = (0.9, 0.95)
    """Not scaled with width or depth."""
    matrix_update: MatrixUpdate = "elementwise"
    """What the optimizer makes of a hidden matrix's gradient: entries (AdamW) or singular values (Muon) of size 1."""


@dataclass(frozen=True)
class ParameterRow:
    """Everything the parameterization decides for one tensor; lr, weight_decay and eps are peak values."""

    name: str
    role: Role
    shape: tuple[int, ...]
    init_mean: float
    init_std: float
    trainable: bool
    """Whether the optimizer sees it; a frozen tensor stays as it was drawn."""
    lr: float
    lr_multiplier: float
    """lr / base lr: the optimizer's group runs at schedule(t) * lr_multiplier."""
    weight_decay: float
    eps: float

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@functools.lru_cache
def parameter_shapes(model: ModelConfig, objective: ObjectiveConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor (a tied head has none), in the order of `named_parameters()`.

    With an objective, also of the tensors that it adds.
    """
    with torch.device("meta"):
        forward = Multipliers(attention=1.0)
        if objective is None:
            skeleton = CausalLM(model, forward)
        else:
            skeleton = TrainedLM(model, forward, make_objective(objective, model, forward))
    return {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}


def parameter_count(model: ModelConfig) -> int:
    """Number of parameters of the model, all of them."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def matrix_lr_factor(shape: tuple[int, ...], fan_in: float, fan_out: float, update: MatrixUpdate) -> float:
    """What width does to a hidden matrix's learning rate.

    AdamW moves every entry by lr, and a product over fan_in entries that agree in sign by fan_in * lr: 1/fan_in. Muon,
    RMS-matched to AdamW, moves the matrix by a spectral norm of 0.2 * sqrt(max(shape)) * lr, which should be as
    sqrt(fan_out / fan_in): as m_N^-0.5 where everything grows in one proportion. 1/fan_in on top would scale twice.
    """
    if update == "elementwise":
        return 1 / fan_in
    rows, columns = shape
    return math.sqrt(fan_out / fan_in * max(rows / fan_out, columns / fan_in) / max(rows, columns))


def parameter_table(
    model: ModelConfig,
    config: ParameterizationConfig,
    base: OptimizerSettings,
    objective: ObjectiveConfig | None = None,
) -> list[ParameterRow]:
    """One row per tensor of the model (a tied head has none), in the order of `named_parameters()`.

    With an objective, also for the tensors that it adds.

    Raises:
        ValueError: a setting that a tied unembedding cannot have, or a key of lr_multipliers that matches no tensor.
    """
    if model.tie_word_embeddings and config.output_scaling == "absorbed":
        raise ValueError(
            "parameterization.output_scaling = 'absorbed' scales the unembedding apart from the embedding: "
            "set model.tie_word_embeddings: false, or use 'forward'"
        )
    if model.tie_word_embeddings and config.zero_init_output:
        raise ValueError(
            "parameterization.zero_init_output = true would zero the embedding as well: "
            "set model.tie_word_embeddings: false"
        )
    size, unmatched, rows = sizes(model, config), set(config.lr_multipliers), []
    for name, shape in parameter_shapes(model, objective).items():
        role = role_of(name)
        fan_in, fan_out = (getattr(size, fan) for fan in fans_of(name))
        matrix_lr = matrix_lr_factor(shape, fan_in, fan_out, base.matrix_update) if role == "hidden_matrix" else 1.0
        scaling = scaling_table(size, fan_in, fan_out, matrix_lr, config.output_scaling == "absorbed")[role]
        matches = [key for key in config.lr_multipliers if key == role or re.fullmatch(key, name)]
        unmatched -= set(matches)
        # Adam's step does not see the logits' 1/gamma_0, so one power of gamma_0 on lr makes features move by it;
        # lr * weight_decay stays as it was, and eps shrinks with the gradient.
        lr_multiplier = scaling.lr * config.gamma_0 * math.prod(config.lr_multipliers[key] for key in matches)
        starts_at_zero = role == "unembedding" and config.zero_init_output
        rows.append(
            ParameterRow(
                name=name,
                role=role,
                shape=shape,
                init_mean=first_value(name, model),
                init_std=0.0 if starts_at_zero else first_std(name, model, scaling.init_std),
                trainable=is_trainable(name, model),
                lr=base.lr * lr_multiplier,
                lr_multiplier=lr_multiplier,
                weight_decay=base.weight_decay * scaling.weight_decay / config.gamma_0,
                eps=base.eps * scaling.eps / config.gamma_0,
            )
        )
    if unmatched:
        raise ValueError(
            f"parameterization.lr_multipliers: {', '.join(sorted(unmatched))} matches no parameter; roles are "
            f"{', '.join(dict.fromkeys(row.role for row in rows))}, names are like {rows[1].name}"
        )
    return rows
