"""The table against CompleteP's Table 1 in literal numbers; partition into roles; initialisation; refusals."""

import math
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization import initialization
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import Multipliers, multipliers
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.table import parameter_table
from plumbline.model.parameterization.tensors import Role, tensor_rule

MakeConfig = Callable[..., ModelConfig]

BASE = OptimizerSettings(lr=0.01, weight_decay=0.1, eps=1e-8)
ALL_ROLES = {"norm": "layernorm", "norm_bias": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16}


# What Table 1 prescribes, as factors on the base values, for models over a base of width 32 and depth 2. "vector":
# biases and norms inside blocks; "outer": embedding, final norm, unembedding; "logits": 1/m_N in the forward pass.
TABLE_1 = """
rule      width depth alpha
|            |  | |    hidden std   hidden lr    hidden decay
|            |  | |    |            |            |   vector lr    block eps    qk eps       outer eps
|            |  | |    |            |            |   |            |            |            |   residual     logits
completep    32  2 1    1            1            1   1            1            1            1   1            1
completep    64  4 1    0.7071067812 1/2          2   1            1/4          1/2          1/2 1/2          1/2
completep   128  8 1    1/2          1/4          4   1            1/16         1/4          1/4 1/4          1/4
completep    96 10 1    0.5773502692 1/3          3   1            1/15         1/5          1/3 1/5          1/3
completep    80  2 1    0.6324555320 2/5          5/2 1            2/5          1            2/5 1            2/5
completep    16  1 1    1.4142135624 2            1/2 1            4            2            2   2            2
depth_alpha 128  8 1    1/2          1/4          4   1            1/16         1/4          1/4 1/4          1/4
depth_alpha  64  8 0.5  0.7071067812 1/4          2   1/2          1/4          1/2          1/2 1/2          1/2
depth_alpha  96  6 0.5  0.5773502692 0.1924500897 3   0.5773502692 0.1924500897 0.5773502692 1/3 0.5773502692 1/3
depth_alpha  32 32 0.5  1            1/4          1   1/4          1/4          1/4          1   1/4          1
depth_alpha 160 10 0.75 0.4472135955 0.1337480610 5   0.6687403050 0.0598139512 0.2990697562 1/5 0.2990697562 1/5
depth_alpha  64  6 2    0.7071067812 3/2          2   3            1/18         1/9          1/2 1/9          1/2
mup         128  8 1    1/2          1/4          4   1            1/4          1            1/4 1            1/4
mup          80  6 1    0.6324555320 2/5          5/2 1            2/5          1            2/5 1            2/5
sp          128  8 1    1            1            1   1            1            1            1   1            1
"""


class Case(NamedTuple):
    """Hold one line of the table."""

    rule: str
    width: int
    depth: int
    alpha: float
    hidden_std: float
    hidden_lr: float
    hidden_decay: float
    vector_lr: float
    block_eps: float
    qk_eps: float
    outer_eps: float
    residual: float
    logits: float


def case(line: str) -> Case:
    rule, width, depth, *numbers = line.split()
    return Case(rule, int(width), int(depth), *(float(Fraction(number)) for number in numbers))


CASES = [case(line) for line in TABLE_1.splitlines()[5:]]


def rule_of(case: Case, **changes: Any) -> ParameterizationConfig:
    values = {"rule": case.rule, "base_hidden_size": 32, "base_num_hidden_layers": 2, "depth_alpha": case.alpha}
    return ParameterizationConfig.model_validate({**values, **changes})


def model_of(case: Case, make_config: MakeConfig) -> ModelConfig:
    return make_config(hidden_size=case.width, num_hidden_layers=case.depth, **ALL_ROLES)


def factors(row: ParameterRow, sigma: float = 0.02) -> tuple[float, float, float, float]:
    return row.init_std / sigma, row.lr / BASE.lr, row.weight_decay / BASE.weight_decay, row.eps / BASE.eps


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:4])))
def test_the_table_is_table_1(make_config: MakeConfig, case: Case) -> None:
    expected: dict[Role, tuple[float, float, float, float]] = {
        "embedding": (1, 1, 1, case.outer_eps),
        "hidden_matrix": (case.hidden_std, case.hidden_lr, case.hidden_decay, case.block_eps),
        "hidden_bias": (0, case.vector_lr, 0, case.block_eps),
        "hidden_norm": (0, case.vector_lr, 0, case.block_eps),
        "qk_norm": (0, case.vector_lr, 0, case.qk_eps),
        "final_norm": (0, 1, 0, case.outer_eps),
        "unembedding": (1, 1, 1, case.outer_eps),
    }
    model, rule = model_of(case, make_config), rule_of(case)
    rows = parameter_table(model, rule, BASE)
    assert {row.role for row in rows} == set(expected)
    for row in rows:
        assert factors(row) == pytest.approx(expected[row.role], rel=1e-9), row.name
        assert row.lr_multiplier == row.lr / BASE.lr
        assert row.init_mean == (1.0 if row.name.endswith("norm.weight") else 0.0), row.name
    forward = multipliers(model, rule)
    assert (forward.residual, forward.output) == pytest.approx((case.residual, case.logits), rel=1e-9)
    assert (forward.embedding, forward.attention) == (1.0, 0.25)


def test_no_learning_rate_depends_on_depth_under_completep(make_config: MakeConfig) -> None:
    rates = []
    for depth in (2, 3, 16):
        model = make_config(hidden_size=96, num_hidden_layers=depth, **ALL_ROLES)
        rule = ParameterizationConfig(rule="completep", base_hidden_size=32, base_num_hidden_layers=2)
        rates.append({(row.role, row.lr) for row in parameter_table(model, rule, BASE)})
    assert rates[0] == rates[1] == rates[2]


@pytest.mark.parametrize("rule", ["sp", "mup", "depth_alpha", "completep"])
def test_decay_per_step_of_hidden_matrices_does_not_depend_on_width(make_config: MakeConfig, rule: str) -> None:
    for width in (16, 32, 80, 96, 512):
        model = make_config(hidden_size=width, num_hidden_layers=2, head_dim=16)
        config = ParameterizationConfig.model_validate(
            {"rule": rule, "base_hidden_size": 32, "base_num_hidden_layers": 2}
        )
        matrices = [row for row in parameter_table(model, config, BASE) if row.role == "hidden_matrix"]
        assert matrices
        for row in matrices:
            assert row.lr * row.weight_decay == pytest.approx(BASE.lr * BASE.weight_decay, rel=1e-12)


@pytest.mark.parametrize("rule", ["sp", "mup", "completep"])
def test_attention_scale_at_the_base_is_the_usual_one_to_the_last_bit(make_config: MakeConfig, rule: str) -> None:
    for head_dim in range(8, 258, 2):
        for base in (None, head_dim):
            config = ParameterizationConfig.model_validate(
                {"rule": rule, "base_hidden_size": 32, "base_num_hidden_layers": 2, "base_head_dim": base}
            )
            found = multipliers(make_config(head_dim=head_dim), config).attention
            assert found == 1 / math.sqrt(head_dim), head_dim


@pytest.mark.parametrize(
    ("rule", "head_dim", "base", "expected"),
    [
        ("completep", 16, 4, 1 / 8),  # 1/16 x sqrt(4)
        ("mup", 32, 64, 1 / 4),
        ("depth_alpha", 48, 24, 0.10206207262),
        ("completep", 48, None, 0.14433756730),
        ("sp", 16, 4, 1 / 4),
    ],
)
def test_attention_scale_is_one_over_head_dim_away_from_the_base(
    make_config: MakeConfig, rule: str, head_dim: int, base: int | None, expected: float
) -> None:
    config = ParameterizationConfig.model_validate(
        {"rule": rule, "base_hidden_size": 32, "base_num_hidden_layers": 2, "base_head_dim": base}
    )
    assert multipliers(make_config(head_dim=head_dim), config).attention == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("gamma", [0.25, 3.0])
def test_gamma_0_divides_logits_decay_and_eps_and_multiplies_learning_rates(
    make_config: MakeConfig, gamma: float
) -> None:
    case = CASES[3]
    model = model_of(case, make_config)
    rich, plain = rule_of(case, gamma_0=gamma, output_multiplier=5.0), rule_of(case, output_multiplier=5.0)
    assert multipliers(model, rich).output == pytest.approx(multipliers(model, plain).output / gamma, rel=1e-12)
    assert multipliers(model, plain).output == pytest.approx(5 / 3, rel=1e-12)
    for row, reference in zip(parameter_table(model, rich, BASE), parameter_table(model, plain, BASE), strict=True):
        assert row.init_std == reference.init_std
        assert row.lr == pytest.approx(reference.lr * gamma, rel=1e-12)
        assert row.lr_multiplier == pytest.approx(reference.lr_multiplier * gamma, rel=1e-12)
        assert row.weight_decay == pytest.approx(reference.weight_decay / gamma, rel=1e-12)
        assert row.eps == pytest.approx(reference.eps / gamma, rel=1e-12)


FAMILIES: list[dict[str, Any]] = [
    {"family": "qwen3"},
    {"family": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"family": "gpt2"},
    {"family": "gpt2", "tie_word_embeddings": False, "qk_norm": "head", "mlp": "geglu"},
    *({"family": family} for family in ("olmo2", "outlier_protected", "fog", "sas", "shaped", "mixit")),
    {"block": "sandwich_norm", "norm": "single_scale_rmsnorm", "embedding_projection": True, "mlp_input_scale": 2.0},
    {"block": "norm_free", "branch_gain": "vector", "mlp": "xielu", "attention_sink": True, "value_residual": True},
    {"branch_gain": "scalar", "attention_gate": "elementwise", "parallel": True},
    {"attention": "pruned"},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_exactly_one_role_and_one_row(make_config: MakeConfig, family: dict[str, Any]) -> None:
    model = make_config(**family)
    rule = ParameterizationConfig(rule="sp")
    module = CausalLM(model, multipliers(model, rule))
    parameters = dict(module.named_parameters())
    rows = parameter_table(model, rule, BASE)
    assert [(row.name, row.shape) for row in rows] == [(name, tuple(p.shape)) for name, p in parameters.items()]
    assert sum(row.count for row in rows) == sum(p.numel() for p in parameters.values())
    for row in rows:
        parts = row.name.split(".")
        stated = [
            rule.role
            for depth in range(len(parts))
            for rule in getattr(module.get_submodule(".".join(parts[:depth])), "tensors", ())
            if re.fullmatch(rule.name, ".".join(parts[depth:]))
        ]
        assert stated == [row.role], row.name
    assert ("lm_head.weight" in parameters) is not model.tie_word_embeddings


@pytest.mark.parametrize("place", ["model.layers.1.self_attn.q_proj", "model.layers.0", "lm_head", ""])
def test_a_tensor_that_no_module_states_is_refused(make_config: MakeConfig, place: str) -> None:
    model = CausalLM(make_config(), Multipliers(attention=1.0))
    model.get_submodule(place).register_parameter("extra", nn.Parameter(torch.zeros(1)))
    name = f"{place}.extra".removeprefix(".")
    with pytest.raises(ValueError, match=rf"parameter {re.escape(repr(name))} has no role"):
        tensor_rule(model, name)


def test_initial_moments_of_each_tensor(make_config: MakeConfig) -> None:
    model = make_config(hidden_size=96, num_hidden_layers=2, vocab_size=300, initializer_range=0.05, **ALL_ROLES)
    rule = ParameterizationConfig(rule="completep", base_hidden_size=32, base_num_hidden_layers=1)
    rows = parameter_table(model, rule, BASE)
    module = CausalLM(model, multipliers(model, rule))
    initialize(module, rows, seed=5)
    parameters = dict(module.named_parameters())
    for row in rows:
        values = parameters[row.name].detach().double()
        if row.role in ("embedding", "unembedding", "hidden_matrix"):
            variance = 0.05**2 / (3 if row.role == "hidden_matrix" else 1)
            standard_error = variance * (2 / values.numel()) ** 0.5
            assert abs(values.square().mean().item() - variance) < 4 * standard_error, row.name
            assert abs(values.mean().item()) < 4 * (variance / values.numel()) ** 0.5, row.name
        else:
            assert values.unique().tolist() == [1.0 if row.name.endswith("norm.weight") else 0.0], row.name


def initial_weights(
    model: ModelConfig, seed: int = 0, backwards: bool = False, given: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    rule = ParameterizationConfig(rule="sp")
    module = CausalLM(model, multipliers(model, rule))
    rows = parameter_table(model, rule, BASE)
    initialize(module, rows[::-1] if backwards else rows, seed, given=given)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_initial_values_depend_on_seed_and_name_alone(make_config: MakeConfig) -> None:
    model = make_config()
    weights = initial_weights(model)
    torch.manual_seed(99)  # the global generator plays no part
    deeper = initial_weights(make_config(num_hidden_layers=5, attention_bias=True))
    backwards = initial_weights(model, backwards=True)
    reseeded = initial_weights(model, seed=1)
    for name, weight in weights.items():
        assert torch.equal(weight, backwards[name])
        assert torch.equal(weight, deeper[name])
        assert torch.equal(weight, reseeded[name]) is name.endswith("norm.weight"), name
    matrices = [weight.flatten()[:64].tolist() for weight in weights.values() if weight.ndim == 2]
    assert len({tuple(values) for values in matrices}) == len(matrices)
    given = {name for name in weights if "mlp" in name}
    for name, weight in initial_weights(model, given=given).items():
        assert torch.equal(weight, torch.zeros_like(weight) if name in given else weights[name]), name


def test_each_tensor_is_written_while_it_is_gathered(make_config: MakeConfig) -> None:
    model, rule = make_config(), ParameterizationConfig(rule="sp")
    module = CausalLM(model, multipliers(model, rule))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    written = []

    @contextmanager
    def gather(parameter: nn.Parameter) -> Iterator[None]:
        assert parameter.isnan().all()
        yield
        assert not parameter.isnan().any()
        written.append(parameter)

    initialize(module, parameter_table(model, rule, BASE), seed=0, gather=gather)
    assert len(written) == len(list(module.parameters()))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_draw_the_same_values_and_no_more_tensors_at_once_than_there_are_threads(
    threads: int, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = initial_weights(make_config())
    drawn: list[str] = []
    draw, written, ahead = initialization._draw, 0, 0

    def watched(module: nn.Module, row: ParameterRow, seed: int) -> torch.Tensor:
        drawn.append(row.name)
        return draw(module, row, seed)

    @contextmanager
    def gather(_: nn.Parameter) -> Iterator[None]:
        nonlocal written, ahead
        yield
        ahead = max(ahead, len(drawn) - written)
        written += 1

    monkeypatch.setattr(initialization, "_draw", watched)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model, rule = make_config(), ParameterizationConfig(rule="sp")
    module = CausalLM(model, multipliers(model, rule))
    rows = [row for row in parameter_table(model, rule, BASE) if row.init_std > 0]
    initialize(module, rows, seed=0, gather=gather)
    assert written == len(drawn) == len(rows) > threads
    assert ahead <= threads
    assert all(torch.equal(module.get_parameter(row.name), expected[row.name]) for row in rows)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rule": "completep", "base_num_hidden_layers": 2}, "completep needs base_hidden_size"),
        ({"rule": "completep", "base_hidden_size": 32}, "completep needs base_num_hidden_layers"),
        ({"rule": "depth_alpha", "base_hidden_size": 32}, "depth_alpha needs base_num_hidden_layers"),
        ({"rule": "mup"}, "mup needs base_hidden_size"),
        (
            {"rule": "completep", "base_hidden_size": 32, "base_num_hidden_layers": 2, "depth_alpha": 0.5},
            r"depth_alpha = 0\.5: completep fixes it at 1; use rule: depth_alpha",
        ),
        ({"rule": "sp", "gamma_0": 0.0}, "gamma_0"),
        ({"rule": "ntk"}, "rule"),
        ({}, "completep needs base_hidden_size"),
    ],
)
def test_an_unusable_rule_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ParameterizationConfig.model_validate(values)


def test_width_rules_need_no_base_depth() -> None:
    assert ParameterizationConfig(rule="mup", base_hidden_size=32).base_num_hidden_layers is None
    assert ParameterizationConfig(rule="sp").base_hidden_size is None
