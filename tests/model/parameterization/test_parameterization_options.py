"""Beyond Table 1: shapes that grow unevenly, the absorbed form, orthogonalised updates, one's own multipliers."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from plumbline.model.config import ModelConfig
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.table import parameter_table

MakeConfig = Callable[..., ModelConfig]

BASE = OptimizerSettings(lr=0.01, weight_decay=0.1, eps=1e-8)
RULE: dict[str, Any] = {"rule": "completep", "base_hidden_size": 32, "base_num_hidden_layers": 3}


def table(
    model: ModelConfig, base: OptimizerSettings = BASE, **changes: Any
) -> tuple[ParameterizationConfig, dict[str, ParameterRow]]:
    """Return the rule and the rows by the last two parts of the name, those of the first block only."""
    rule = ParameterizationConfig.model_validate({**RULE, **changes})
    rows = {row.name.removesuffix(".weight").split(".")[-1]: row for row in parameter_table(model, rule, base)[::-1]}
    return rule, rows


def reference(width: float, depth: float, alpha: float) -> dict[str, tuple[float, float, float, float]]:
    """Write CompleteP's Table 1 a second time, in powers: role -> std, lr, weight decay, eps."""
    block_eps = width**-1 * depth**-alpha
    return {
        "embed_tokens": (1, 1, 1, width**-1),
        "up_proj": (width**-0.5, width**-1 * depth ** (alpha - 1), width, block_eps),
        "input_layernorm": (0, depth ** (alpha - 1), 0, block_eps),
        "lm_head": (1, 1, 1, width**-1),
    }


@pytest.mark.parametrize("seed", range(10))
def test_ten_random_sizes_agree_with_table_1(make_config: MakeConfig, seed: int) -> None:
    draw = random.Random(seed)
    width, depth, alpha = draw.choice(range(1, 40)), draw.choice(range(1, 30)), draw.uniform(0.1, 2.0)
    model = make_config(hidden_size=8 * width, num_hidden_layers=depth, head_dim=8)
    rule, rows = table(model, rule="depth_alpha", depth_alpha=alpha)
    m_n, m_l = 8 * width / 32, depth / 3
    for name, factors in reference(m_n, m_l, alpha).items():
        row = rows[name]
        found = (row.init_std / 0.02, row.lr / BASE.lr, row.weight_decay / BASE.weight_decay, row.eps / BASE.eps)
        assert found == pytest.approx(factors, rel=1e-9), (name, width, depth, alpha)
    forward = multipliers(model, rule)
    assert (forward.residual, forward.output) == pytest.approx((m_l**-alpha, 1 / m_n), rel=1e-9)


UNEVEN: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "attention_bias": True,
    "mlp_bias": True,
}
UNEVEN_BASE: dict[str, Any] = {
    "base_num_attention_heads": 4,
    "base_num_key_value_heads": 2,
    "base_head_dim": 8,
    "base_intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("name", "fan_in", "fan_out"),
    [  # ratios to a base of width 32, 4 query and 2 key/value heads of 8, MLP of 128
        ("q_proj", 2, 6),
        ("k_proj", 2, 4),
        ("v_proj", 2, 4),
        ("o_proj", 6, 2),
        ("gate_proj", 2, 0.75),
        ("up_proj", 2, 0.75),
        ("down_proj", 0.75, 2),
    ],
)
def test_matrices_scale_with_their_own_fans(make_config: MakeConfig, name: str, fan_in: float, fan_out: float) -> None:
    _, rows = table(make_config(**UNEVEN), **UNEVEN_BASE)
    row = rows[name]
    assert row.lr == pytest.approx(BASE.lr / fan_in, rel=1e-12)
    assert row.weight_decay == pytest.approx(BASE.weight_decay * fan_in, rel=1e-12)
    assert row.eps == pytest.approx(BASE.eps / fan_out, rel=1e-12)
    names = {row.name: row for row in parameter_table(make_config(**UNEVEN), *rule_and_base(UNEVEN_BASE))}
    bias = next(row for key, row in names.items() if key.endswith(f"{name}.bias"))
    assert (bias.lr, bias.eps) == pytest.approx((BASE.lr, BASE.eps / fan_out), rel=1e-12)


def test_gains_of_a_whole_projection_scale_with_its_outputs(make_config: MakeConfig) -> None:
    _, rows = table(make_config(**UNEVEN, qk_norm="projection"), **UNEVEN_BASE)
    for name, fan_out in {"q_whole_norm": 6, "k_whole_norm": 4, "input_layernorm": 2}.items():
        assert rows[name].eps == pytest.approx(BASE.eps / fan_out, rel=1e-12), name
        assert rows[name].gradient_growth == pytest.approx(fan_out**-0.5, rel=1e-12), name


@pytest.mark.parametrize(
    ("name", "switches"),
    [("sinks", {"attention_sink": True}), ("shape_gains", {"attention": "shaped", "shaped_gains": "learned"})],
)
def test_numbers_of_heads_scale_with_how_many_there_are(
    make_config: MakeConfig, name: str, switches: dict[str, Any]
) -> None:
    """A head's share of the gradient is one over their number, however wide each is."""
    _, rows = table(make_config(**UNEVEN, **switches), **UNEVEN_BASE)
    assert rows[name].eps == pytest.approx(BASE.eps / 3, rel=1e-12)
    assert rows[name].gradient_growth == pytest.approx(3**-0.5, rel=1e-12)
    _, rows = table(make_config(hidden_size=64, head_dim=16, **switches), base_head_dim=8)
    assert (rows[name].eps, rows[name].gradient_growth) == pytest.approx((BASE.eps, 1.0), rel=1e-12)


@pytest.mark.parametrize(("gate", "fan_out"), [("head", 3), ("elementwise", 6)])
def test_a_gate_scales_with_the_outputs_that_it_has(make_config: MakeConfig, gate: str, fan_out: float) -> None:
    _, rows = table(make_config(**UNEVEN, attention_gate=gate), **UNEVEN_BASE)
    assert rows["g_proj"].eps == pytest.approx(BASE.eps / fan_out, rel=1e-12)
    norm = math.sqrt(12 * (16 if gate == "elementwise" else 1)) + math.sqrt(64)
    base_norm = math.sqrt(4 * (8 if gate == "elementwise" else 1)) + math.sqrt(32)
    assert rows["g_proj"].init_std == pytest.approx(0.02 * math.sqrt(fan_out / 2) * base_norm / norm, rel=1e-12)
    wider = {**UNEVEN, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_gate": gate}
    _, muon = table(make_config(**wider), replace(BASE, matrix_update="orthogonal"), **UNEVEN_BASE)
    assert muon["g_proj"].lr == pytest.approx(BASE.lr, rel=1e-12), "only the width of a head has grown"


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"])
def test_uneven_matrices_start_at_the_spectral_norm_of_the_condition(make_config: MakeConfig, name: str) -> None:
    """Drawn matrices: the norm grows as sqrt(fan_out / fan_in), as it is at the base, where the deviation is 0.02."""
    torch.manual_seed(0)
    big: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 16}
    small = {**big, "hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 256}
    bases: dict[str, Any] = {
        "base_num_attention_heads": 8,
        "base_num_key_value_heads": 2,
        "base_intermediate_size": 256,
    }
    _, rows = table(make_config(**big, intermediate_size=512), base_hidden_size=128, **bases)
    _, base_rows = table(make_config(**small), base_hidden_size=128, **bases)
    assert base_rows[name].init_std == 0.02
    norms = {}
    for row in (rows[name], base_rows[name]):
        fan_out, fan_in = row.shape
        drawn = torch.linalg.matrix_norm(row.init_std * torch.randn(row.shape), 2).item()
        norms[row.shape] = drawn * math.sqrt(fan_in / fan_out)
    assert len(norms) == 2
    assert max(norms.values()) / min(norms.values()) == pytest.approx(1, abs=0.1)


def rule_and_base(changes: dict[str, Any]) -> tuple[ParameterizationConfig, OptimizerSettings]:
    return ParameterizationConfig.model_validate({**RULE, **changes}), BASE


def test_shapes_without_a_base_of_their_own_grow_with_the_width(make_config: MakeConfig) -> None:
    _, rows = table(make_config(**UNEVEN))
    for name in ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj"):
        assert (rows[name].lr, rows[name].eps) == pytest.approx((BASE.lr / 2, BASE.eps / 2), rel=1e-12)


def test_uneven_shapes_at_their_base_are_standard(make_config: MakeConfig) -> None:
    model = make_config(**UNEVEN)
    at_base: dict[str, Any] = {
        "base_hidden_size": 64,
        "base_num_attention_heads": 12,
        "base_num_key_value_heads": 4,
        "base_head_dim": 16,
        "base_intermediate_size": 96,
    }
    assert table(model, **at_base)[1] == table(model, rule="sp")[1]
    assert table(model, rule="sp", **UNEVEN_BASE)[1] == table(model, rule="sp")[1]


def test_the_absorbed_form_moves_the_factor_into_the_unembedding(make_config: MakeConfig) -> None:
    model = make_config(hidden_size=128)
    forward_rule, forward = table(model)
    absorbed_rule, absorbed = table(model, output_scaling="absorbed", output_multiplier=3.0, gamma_0=2.0)
    assert multipliers(model, forward_rule).output == 1 / 4
    assert multipliers(model, absorbed_rule).output == 3 / 2
    _, absorbed = table(model, output_scaling="absorbed")
    head, plain = absorbed.pop("lm_head"), forward.pop("lm_head")
    assert absorbed == forward
    assert (head.init_std, head.lr, head.weight_decay, head.eps) == pytest.approx((0.02 / 4, 0.01 / 4, 0.4, 1e-8))
    assert (plain.init_std, plain.lr, plain.weight_decay, plain.eps) == pytest.approx((0.02, 0.01, 0.1, 1e-8 / 4))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"output_scaling": "absorbed"}, "parameterization.output_scaling = 'absorbed'.*tie_word_embeddings"),
        ({"zero_init_output": True}, r"parameterization\.zero_init_output = true.*tie_word_embeddings"),
        ({"lr_multipliers": {"unembedding": 2.0}}, r"parameterization\.lr_multipliers: unembedding matches no"),
        ({"lr_multipliers": {"down_proj": 2.0}}, r"down_proj matches no parameter; roles are embedding, hidden_norm"),
        ({"lr_multipliers": {"(": 2.0}}, r"parameterization\.lr_multipliers: '\(' is not a regular expression"),
    ],
)
def test_settings_that_a_tied_model_cannot_have_are_refused(
    make_config: MakeConfig, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        table(make_config(tie_word_embeddings=True), **setting)


def test_logits_may_start_at_zero(make_config: MakeConfig) -> None:
    _, rows = table(make_config(), zero_init_output=True)
    assert rows["lm_head"].init_std == 0.0
    assert rows["embed_tokens"].init_std == 0.02


def test_branches_may_start_smaller_as_in_gpt_2(make_config: MakeConfig) -> None:
    model = make_config(num_hidden_layers=8)
    _, plain = table(model, rule="sp")
    _, scaled = table(model, rule="sp", scaled_branch_init=True)
    smaller = {name for name in plain if plain[name] != scaled[name]}
    assert smaller == {"o_proj", "down_proj"}
    for name in smaller:
        assert scaled[name].init_std == pytest.approx(plain[name].init_std / 4, rel=1e-12), "16 branches"
    objective: Any = TypeAdapter(ObjectiveConfig).validate_python({"name": "multi_token"})
    rows = parameter_table(model, *rule_and_base({"rule": "sp", "scaled_branch_init": True}), objective)
    assert {row.init_std for row in rows if row.name.startswith("objective.") and "proj" in row.name} == {0.02}
    with pytest.raises(ValueError, match=r"scaled_branch_init = true with rule: completep would scale .* twice"):
        table(model, scaled_branch_init=True)
    with pytest.raises(ValueError, match=r"scaled_branch_init = true: the branches of model.block = post_norm end in"):
        table(make_config(block="post_norm"), rule="sp", scaled_branch_init=True)


def test_own_multipliers_go_by_role_or_name_and_multiply(make_config: MakeConfig) -> None:
    model = make_config(hidden_size=64)
    _, plain = table(model)
    _, own = table(
        model, lr_multipliers={"hidden_matrix": 3.0, r".*\.(up|down)_proj\.weight": 0.5, "lm_head.weight": 7}
    )
    for name, factor in {"q_proj": 3.0, "up_proj": 1.5, "down_proj": 1.5, "lm_head": 7.0, "norm": 1.0}.items():
        assert own[name].lr == pytest.approx(plain[name].lr * factor, rel=1e-12)
        assert own[name].lr_multiplier == pytest.approx(plain[name].lr_multiplier * factor, rel=1e-12)
        assert own[name].weight_decay == plain[name].weight_decay


def test_eps_of_qk_norm_shrinks_as_heads_widen(make_config: MakeConfig) -> None:
    for head_dim, factor in ((8, 1), (16, 2), (32, 4)):
        _, rows = table(make_config(head_dim=head_dim), base_head_dim=8)
        assert rows["q_norm"].eps == pytest.approx(BASE.eps / factor, rel=1e-12)
        assert rows["q_norm"].lr == BASE.lr


@pytest.mark.parametrize("rule", ["sp", "mup"])
def test_a_depth_exponent_that_no_rule_reads_is_refused(make_config: MakeConfig, rule: str) -> None:
    with pytest.raises(ValueError, match=f"depth_alpha = 0.5: rule: {rule} does not scale with depth"):
        table(make_config(), rule=rule, depth_alpha=0.5)


@pytest.mark.parametrize("name", ["multi_token", "sequential_mtp"])
def test_depth_does_not_scale_what_stands_beside_the_blocks(make_config: MakeConfig, name: str) -> None:
    objective: Any = TypeAdapter(ObjectiveConfig).validate_python({"name": name})
    own = {}
    for depth in (3, 48):
        rule, base = rule_and_base({"rule": "depth_alpha", "depth_alpha": 0.5})
        rows = parameter_table(make_config(num_hidden_layers=depth), rule, base, objective)
        own[depth] = [row for row in rows if row.name.startswith("objective.")]
        inside = next(row for row in rows if row.name == "model.layers.0.mlp.up_proj.weight")
        assert inside.eps == pytest.approx(BASE.eps * (depth / 3) ** -0.5)
    assert own[3] == own[48] != []


@pytest.mark.parametrize(
    ("shape", "name", "expected"),
    [
        ({"hidden_size": 128}, "q_proj", 1 / 2),  # m_N = 4, square: m_N^-1/2
        ({"hidden_size": 128, "intermediate_size": 512}, "up_proj", 1 / 2),
        ({"hidden_size": 32}, "down_proj", 1.0),
        ({"hidden_size": 64, **UNEVEN, "intermediate_size": 512}, "up_proj", math.sqrt(4 / 2 * 128 / 512)),
        ({"hidden_size": 64, **UNEVEN, "intermediate_size": 512}, "down_proj", math.sqrt(2 / 4 * 128 / 512)),
    ],
)
def test_an_orthogonal_update_scales_with_the_spectral_condition_once(
    make_config: MakeConfig, shape: dict[str, Any], name: str, expected: float
) -> None:
    base = OptimizerSettings(lr=0.01, weight_decay=0.1, eps=1e-8, matrix_update="orthogonal")
    uneven = UNEVEN_BASE if shape["hidden_size"] == 64 else {}
    _, rows = table(make_config(**shape), base, **uneven)
    _, elementwise = table(make_config(**shape), **uneven)
    row = rows[name]
    assert row.lr_multiplier == pytest.approx(expected, rel=1e-12)
    assert row.lr * row.weight_decay == pytest.approx(BASE.lr * BASE.weight_decay, rel=1e-12)
    assert row.init_std == elementwise[name].init_std
    for other in ("embed_tokens", "lm_head", "input_layernorm"):
        assert rows[other] == elementwise[other]
