"""Scale init, learning rate, weight decay, eps and the forward pass with size: the parameterization, as a table.

    m_N = hidden_size / base_hidden_size              width multiplier
    m_L = num_hidden_layers / base_num_hidden_layers  depth multiplier
    a   = depth_alpha                                 1 is CompleteP, 0.5 is depth-muP

Source: Table 1 of CompleteP (arXiv 2505.01618), with these additions:

- AdamW's eps outside the blocks shrinks with the gradient (1/m_N: Complete(d)P, arXiv 2512.22382, for the embedding;
  the same argument gives the final norm and the unembedding). The gains of QK-norm sum their gradient over all heads,
  so their eps scales only with the head width.
- The attention scale is written so that it equals 1/sqrt(head_dim) exactly at the base.
- If shapes do not all grow in proportion, each hidden matrix scales with its own fans: learning rate with the ratio of
  its fan-in, eps with that of its fan-out (the gradient of one of n units shrinks as 1/n), init such that its spectral
  norm grows as sqrt(fan_out / fan_in) (arXiv 2310.17813).
- Gains through which the whole stream passes in each block (skipless blocks) are no branch: what they do to the stream
  multiplies over the blocks, so each learns 1/m_L as fast for every depth_alpha, and its gradient does not shrink.
- Modules outside the stack of blocks (an objective's own) do not grow in number, so they are not scaled with depth.
- An optimizer that orthogonalises (Muon) moves a matrix by a fixed spectral norm; the spectral condition (arXiv
  2310.17813: update norm ~ sqrt(fan_out / fan_in)) then takes the place of the 1/fan_in of AdamW.

The role of a tensor follows from its *name* (tensors.py), never from its shape (ZeRO-3 shows empty shapes), and the
table only from the configuration, so `plan.py`, the initialisation and the optimizer's groups use the same rows. Weight
decay is that of torch's AdamW: a step shrinks a weight by lr * weight_decay of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plumbline.model.blocks import block_kind
from plumbline.model.config import ModelConfig
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.parameterization.config import (
    OWN_FACTORS,
    MatrixUpdate,
    OptimizerSettings,
    ParameterizationConfig,
)
from plumbline.model.parameterization.own_factors import OwnFactors
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.sizes import Sizes, sizes
from plumbline.model.parameterization.skeleton import ModelTensor, model_tensors
from plumbline.model.parameterization.tensors import Role


@dataclass(frozen=True)
class Scaling:
    """Hold one row of the table: factors on the base values of init std, learning rate, weight decay and eps.

    The last is the factor on the number of a tensor's entries in one block, over which a gradient's norm sums.
    """

    init_std: float
    lr: float
    weight_decay: float
    eps: float
    entries: float


def scaling_table(
    size: Sizes, fan_in: float, fan_out: float, matrix_lr: float, absorbed: bool, decay_exponent: float
) -> dict[Role, Scaling]:
    """Return Table 1 of CompleteP for one tensor; the factor 0 means "none" (norms, biases).

    Args:
        size: sizes of the model relative to the base.
        fan_in: ratio of this hidden matrix's fan-in to the base's; m_N if everything grows in proportion.
        fan_out: the same for the fan-out, also for a bias or a norm's gains.
        matrix_lr: factor of width on a hidden matrix's learning rate.
        absorbed: whether the unembedding carries the logits' 1/m_N in its weights.
        decay_exponent: exponent with which the decay of a matrix grows as its learning rate falls.
    """
    n, l, a, x = size.width, size.depth, size.alpha, decay_exponent  # noqa: E741 - the paper's letters
    h, decay = size.head_dim, (1 / matrix_lr) ** x
    block_lr, block_eps = l ** (a - 1), l**-a
    return {
        #                        init std      lr                    decay  eps                  entries
        "embedding":     Scaling(1.0,          1.0,                  1.0,   1 / n,               n),
        "hidden_matrix": Scaling(fan_in**-0.5, block_lr * matrix_lr, decay, block_eps / fan_out, fan_in * fan_out),
        "hidden_bias":   Scaling(0.0,          block_lr,             0.0,   block_eps / fan_out, fan_out),
        "hidden_norm":   Scaling(0.0,          block_lr,             0.0,   block_eps / fan_out, fan_out),
        "hidden_scalar": Scaling(0.0,          block_lr,             0.0,   block_eps,           1.0),
        "stream_norm":   Scaling(0.0,          1 / l,                0.0,   1 / fan_out,         fan_out),
        "stream_scalar": Scaling(0.0,          1 / l,                0.0,   1.0,                 1.0),
        "qk_norm":       Scaling(0.0,          block_lr,             0.0,   block_eps / h,       h),
        "mixing":        Scaling(0.0,          0.0,                  0.0,   1.0,                 n),
        "projection":    Scaling(n**-0.5,      1 / n,                n**x,  1 / n,               n * n),
        "final_norm":    Scaling(0.0,          1.0,                  0.0,   1 / n,               n),
        "final_scalar":  Scaling(0.0,          1.0,                  0.0,   1.0,                 1.0),
        "unembedding":   Scaling(1 / n,        1 / n,                n**x,  1.0,                 n) if absorbed
                    else Scaling(1.0,          1.0,                  1.0,   1 / n,               n),
    }  # fmt: skip


def matrix_lr_factor(shape: tuple[int, ...], fan_in: float, fan_out: float, update: MatrixUpdate) -> float:
    """Return the factor of width on a hidden matrix's learning rate.

    AdamW moves every entry by lr, and so a product over fan_in entries of equal sign by fan_in * lr: the factor is
    1/fan_in. Muon, RMS-matched to AdamW, moves the matrix by a spectral norm of 0.2 * sqrt(max(shape)) * lr, which
    should scale as sqrt(fan_out / fan_in): the factor is m_N^-0.5 if everything grows in proportion. 1/fan_in on top
    would scale twice.
    """
    if update == "elementwise":
        return 1 / fan_in
    rows, columns = shape
    return math.sqrt(fan_out / fan_in * max(rows / fan_out, columns / fan_in) / max(rows, columns))


def uneven_init_factor(shape: tuple[int, ...], fan_in: float, fan_out: float) -> float:
    """Return the factor of uneven growth on a hidden matrix's initial values, on top of fan_in^-1/2.

    Entries with standard deviation s have a spectral norm of s (sqrt(rows) + sqrt(columns)), which should grow as
    sqrt(fan_out / fan_in). Without this factor, a single key/value head keeps rows that are longer than those of the
    update.
    """
    if fan_in == fan_out:
        return 1.0
    rows, columns = shape
    base = math.sqrt(rows / fan_out) + math.sqrt(columns / fan_in)
    return math.sqrt(fan_out) * base / (math.sqrt(rows) + math.sqrt(columns))


def _end_factor(name: str, model: ModelConfig) -> float:
    """Return GPT-2's factor on a matrix that ends a branch, (number of branches)^-1/2, or 1 for any other."""
    block = block_kind(model)
    if block.ends_in_norm:
        raise ValueError(
            f"parameterization.scaled_branch_init = true: the branches of model.block = {model.block} end in a norm, "
            "which undoes it"
        )
    ends = tuple(f"{end}.weight" for end in block.branch_ends.values())
    return (len(ends) * model.num_hidden_layers) ** -0.5 if name.endswith(ends) else 1.0


@dataclass(frozen=True)
class _Table:
    """Make the rows of one model's tensors."""

    model: ModelConfig
    config: ParameterizationConfig
    base: OptimizerSettings
    tensors: Mapping[str, ModelTensor]
    stack: Sizes
    own: Mapping[str, OwnFactors]

    def row(self, name: str) -> ParameterRow:
        """Return the row of a tensor."""
        tensor, size, scaling = self.tensors[name], self._size(name), self._scaling(name)
        rule, gamma = tensor.rule, self.config.gamma_0
        factors = {key: self._own(key, name) for key in self.own}
        start_factor = 1.0 if rule.start_with is None else self._own("init_multipliers", rule.start_with)
        # Adam's step is invariant to the logits' 1/gamma_0, so a factor gamma_0 on lr makes features move by that much
        # more; lr * weight_decay is unchanged, and eps shrinks with the gradient.
        lr_multiplier = scaling.lr * gamma * factors["lr_multipliers"]
        decay = self.base.weight_decay * scaling.weight_decay / gamma
        return ParameterRow(
            name=name,
            role=rule.role,
            shape=tensor.shape,
            init_mean=rule.first_value(self.model) * start_factor,
            init_std=self._first_deviation(name, scaling.init_std * factors["init_multipliers"]),
            trainable=rule.trains(self.model),
            lr=self.base.lr * lr_multiplier,
            lr_multiplier=lr_multiplier,
            weight_decay=decay * factors["weight_decay_multipliers"],
            eps=self.base.eps * scaling.eps / gamma * factors["eps_multipliers"],
            # eps scales like one entry of the gradient, and the squared norm sums over entries and blocks
            gradient_growth=scaling.eps * math.sqrt(scaling.entries * size.depth),
        )

    def is_drawn_by_factor(self, name: str) -> bool:
        """Return whether a tensor's first values depend on the table's factor."""
        return self._scaling(name).init_std != 0.0 and self.tensors[name].rule.follows_factor(self.model)

    def _own(self, key: str, name: str) -> float:
        """Return the user's own factor on a quantity of a tensor."""
        return self.own[key].of(name, self.tensors[name].rule.role)

    def _size(self, name: str) -> Sizes:
        """Return the sizes that a tensor scales with."""
        repeats = name.startswith("model.layers.") and self.tensors[name].rule.repeats
        return self.stack if repeats else self.stack.outside_the_stack()

    def _fans(self, name: str) -> tuple[float, float]:
        """Return the ratios of a tensor's fan-in and fan-out to the base's."""
        fan_in, fan_out = self.tensors[name].rule.fans
        return getattr(self._size(name), fan_in), getattr(self._size(name), fan_out)

    def _scaling(self, name: str) -> Scaling:
        """Return the table's factors for a tensor."""
        tensor, config = self.tensors[name], self.config
        role, (fan_in, fan_out) = tensor.rule.role, self._fans(name)
        matrix_lr = 1.0
        if role == "hidden_matrix":
            matrix_lr = matrix_lr_factor(tensor.shape, fan_in, fan_out, self.base.matrix_update)
        absorbed, decay_exponent = config.output_scaling == "absorbed", config.weight_decay_width_exponent
        scaling = scaling_table(self._size(name), fan_in, fan_out, matrix_lr, absorbed, decay_exponent)[role]
        if role == "unembedding" and config.zero_init_output:
            return replace(scaling, init_std=0.0)
        return scaling

    def _first_deviation(self, name: str, factor: float) -> float:
        """Return the standard deviation of a tensor's initial values, given the factor on the base's."""
        tensor, model, gain = self.tensors[name], self.model, self.config.hidden_init_gain
        if tensor.rule.role != "hidden_matrix":
            return tensor.rule.std(model, factor)
        fan_in, fan_out = self._fans(name)
        factor *= uneven_init_factor(tensor.shape, fan_in, fan_out)
        if self.config.scaled_branch_init and name.startswith("model.layers."):
            factor *= _end_factor(name, model)
        if gain is not None:  # replaces the base's deviation; `factor` scales it with width
            base_columns = tensor.shape[1] / fan_in
            model = model.model_copy(update={"initializer_range": gain / math.sqrt(base_columns)})
        return tensor.rule.std(model, factor)


def _check_tied(model: ModelConfig, config: ParameterizationConfig) -> None:
    """Refuse what would scale a tied unembedding apart from the embedding.

    Raises:
        ValueError: names the setting and what would fit.
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


def parameter_table(
    model: ModelConfig,
    config: ParameterizationConfig,
    base: OptimizerSettings,
    objective: ObjectiveConfig | None = None,
) -> list[ParameterRow]:
    """Return one row per tensor of the model (none for a tied head), in the order of `named_parameters()`.

    With an objective, the tensors that it adds are included.

    Raises:
        ValueError: a setting is incompatible with a tied unembedding or the block, or a key of own factors matches no
            tensor, or none that it would change.
    """
    _check_tied(model, config)
    own = {key: OwnFactors(key, getattr(config, key)) for key in OWN_FACTORS}
    table = _Table(model, config, base, model_tensors(model, objective), sizes(model, config), own)
    rows = [table.row(name) for name in table.tensors]
    for factor in own.values():
        factor.check_all_met(rows)
    own["init_multipliers"].check_first_values(rows, table.is_drawn_by_factor)
    return rows
