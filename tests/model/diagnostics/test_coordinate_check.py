"""The coordinate check passes where it should and fails where it should; each wrong multiplier turns a gate red."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plumbline.launcher.runtime.optim.optimizer import OptimizerConfig, group_settings, make_optimizer
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.diagnostics.coordinate_check import GATES, BlockMaps, Gate, activations, coordinate_check, slope
from plumbline.model.parameterization import table
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import Multipliers, multipliers
from plumbline.model.parameterization.rows import ParameterRow

WIDTHS, DEPTHS, HEADS = (32, 64, 128), (2, 4, 8, 16), (16, 32, 64, 128)
RATES = {"width": 4e-3, "depth": 1e-3, "head_dim": 1e-3}
SEEDS, STEPS = (1, 2), (0, 1, 10)
RULES: dict[str, dict[str, Any]] = {
    "sp": {"rule": "sp"},
    "mup": {"rule": "mup"},
    "alpha 0.5": {"rule": "depth_alpha", "depth_alpha": 0.5},
    "completep": {"rule": "completep"},
}


@dataclass(frozen=True)
class Wrong:
    """Make one multiplier of a parameterization wrong, by two functions applied to the right one."""

    forward: Callable[[Multipliers, float, float], Multipliers] = lambda right, _n, _l: right
    row: Callable[[ParameterRow, float, float], ParameterRow] = lambda right, _n, _l: right


RIGHT = Wrong()


def text() -> Tensor:
    """Eight rows of 65 ASCII characters of real prose that does not change: the licence."""
    letters = (Path(__file__).parents[3] / "LICENSE").read_bytes()[: 8 * 65]
    return torch.tensor(list(letters)).view(8, 65)


def records(
    rule: dict[str, Any], model: ModelConfig, lr: float, seed: int, wrong: Wrong, eps: float, steps: tuple[int, ...]
) -> dict[int, Any]:
    """Return one check of one model."""
    config = ParameterizationConfig.model_validate(
        {"base_hidden_size": WIDTHS[0], "base_num_hidden_layers": DEPTHS[0], "base_head_dim": HEADS[0], **rule}
    )
    m_n, m_l = model.hidden_size / WIDTHS[0], model.num_hidden_layers / DEPTHS[0]
    rows = table.parameter_table(model, config, OptimizerSettings(lr, weight_decay=0.1, eps=eps))
    rows = [wrong.row(row, m_n, m_l) for row in rows]
    module = CausalLM(model, wrong.forward(multipliers(model, config), m_n, m_l))
    initialize(module, rows, seed)
    weights = dict(module.named_parameters())
    groups = [
        {"params": [weights[row.name]], "lr": row.lr, "weight_decay": row.weight_decay, "eps": row.eps} for row in rows
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    tokens = text()
    return coordinate_check(module, optimizer, tokens[:, :-1], tokens[:, 1:], steps)


@cache
def slopes(
    family: str,
    rule: str,
    wrong: Wrong = RIGHT,
    eps: float = 1e-12,
    seeds: tuple[int, ...] = SEEDS,
    steps: tuple[int, ...] = STEPS,
) -> dict[tuple[str, int], float]:
    """Return (quantity, step) -> slope of the seeds' mean over the sizes of a family: width, depth, or head_dim."""
    sizes = {"width": WIDTHS, "depth": DEPTHS, "head_dim": HEADS}[family]
    values: dict[tuple[str, int], list[float]] = {}
    for size in sizes:
        model = ModelConfig.model_validate(
            {
                "vocab_size": 128,
                "hidden_size": size if family == "width" else WIDTHS[0],
                "num_hidden_layers": size if family == "depth" else DEPTHS[0],
                "num_attention_heads": (size if family == "width" else WIDTHS[0]) // 16,
                "head_dim": size if family == "head_dim" else 16,
                "intermediate_size": 3 * (size if family == "width" else WIDTHS[0]),
                "max_position_embeddings": 64,
            }
        )
        runs = [records(RULES[rule], model, RATES[family], seed, wrong, eps, steps) for seed in seeds]
        for step, record in runs[0].items():
            for quantity in record:
                mean = sum(run[step][quantity] for run in runs) / len(runs)
                values.setdefault((quantity, step), []).append(mean)
    return {key: slope(sizes, found) for key, found in values.items()}


def failing(family: str, rule: str) -> set[str]:
    """Return the gates that do not hold, as `quantity@step`."""
    found = slopes(family, rule)
    return {f"{g.quantity}@{g.step}" for g in GATES[family] if not g.holds(found[g.quantity, g.step])}


@pytest.mark.parametrize("family", ["width", "depth"])
def test_completep_passes_every_gate(family: str) -> None:
    assert failing(family, "completep") == set()


def change_of_maps(longest_block: int) -> float:
    """Return the slope over width of the change of blocks' maps after ten steps of SOAP on hidden matrices."""
    found = []
    for width in (32, 128):
        shape = {"vocab_size": 128, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": width // 16}
        model = ModelConfig.model_validate(
            {**shape, "head_dim": 16, "intermediate_size": 3 * width, "max_position_embeddings": 64}
        )
        rule = ParameterizationConfig(base_hidden_size=32, base_num_hidden_layers=2, base_head_dim=16)
        rows = table.parameter_table(model, rule, OptimizerSettings(0.01, weight_decay=0.0, eps=1e-12))
        module = CausalLM(model, multipliers(model, rule))
        initialize(module, rows, seed=1)
        optimizer = OptimizerConfig(name="soap", lr=0.01, eps=1e-12, precondition_block=longest_block)
        groups = group_settings(rows, optimizer, (0.9, 0.95))
        tokens = text()
        made = make_optimizer(module, groups, sharded=False)
        records = coordinate_check(module, made, tokens[:, :-1], tokens[:, 1:], (10,))
        found.append(records[10]["change/map"])
    return slope((32, 128), found)


def test_soap_moves_maps_at_every_width_in_blocks_alone() -> None:
    """Its spectral gates pass either way: bases that grow with the width spend the step where the data is not."""
    gate = next(gate for gate in GATES["width"] if gate.quantity == "change/map")
    assert gate.holds(change_of_maps(longest_block=32))
    assert not gate.holds(change_of_maps(longest_block=10_000))


def test_a_map_changes_by_its_own_weights_alone() -> None:
    """Not by what enters the block, and in proportion to the residual multiplier."""
    model = ModelConfig.model_validate(
        {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"max_position_embeddings": 64, "intermediate_size": 64}
    )
    rule = ParameterizationConfig(rule="sp")
    module = CausalLM(model, multipliers(model, rule))
    initialize(module, table.parameter_table(model, rule, OptimizerSettings(0.01, 0.0, 1e-8)), seed=1)
    tokens = text()[:, :-1]
    maps = BlockMaps(module, tokens)
    assert maps.change() == 0.0
    with torch.no_grad():
        module.model.embed_tokens.weight.mul_(-2.0)
        assert maps.change() == 0.0
        last = module.model.layers[1]
        added = last(*maps._arguments[1]) - maps._arguments[1][0]
        for matrix in (last.self_attn.o_proj, last.mlp.down_proj):  # type: ignore[union-attr]
            matrix.weight.zero_()  # type: ignore[union-attr, operator]
    assert maps.change() == pytest.approx(added.square().mean().sqrt().item() / 2, rel=1e-6), "one block of two"


def test_standard_parameterization_blows_up_with_width() -> None:
    found = slopes("width", "sp")
    for quantity in ("size/attention", "size/mlp", "size/residual", "change/residual", "spectral_change/hidden"):
        assert found[quantity, 10] > 0.8, quantity
        assert f"{quantity}@10" in failing("width", "sp")


def test_mup_without_a_depth_rule_blows_up_with_depth() -> None:
    assert {"change/residual@10", "size/residual@10", "change/block@1"} <= failing("depth", "mup")
    assert slopes("depth", "mup")["change/residual", 10] > 0.3


def test_alpha_one_half_keeps_the_stream_but_moves_its_weights_less_with_depth() -> None:
    assert failing("depth", "alpha 0.5") == {"change/block@1", "spectral_change/hidden@10"}
    assert slopes("depth", "alpha 0.5")["spectral_change/hidden", 10] == pytest.approx(-0.5, abs=0.1)


def scaled(**powers: tuple[str, float, float]) -> Wrong:
    """Return rows in which `field` of every row of `role` is multiplied by m_N^a * m_L^b."""

    def change(row: ParameterRow, m_n: float, m_l: float) -> ParameterRow:
        if row.role not in powers:
            return row
        field, a, b = powers[row.role]
        return replace(row, **{field: getattr(row, field) * m_n**a * m_l**b})

    return Wrong(row=change)


def forward(**powers: tuple[float, float]) -> Wrong:
    """Forward multipliers that are m_N^a * m_L^b, whatever the rule says."""
    return Wrong(forward=lambda right, n, l: replace(right, **{k: n**a * l**b for k, (a, b) in powers.items()}))  # noqa: E741


MUTATIONS: list[tuple[str, str, Wrong, str]] = [
    ("no residual multiplier", "depth", forward(residual=(0, 0)), "change/residual@10"),
    ("residual m_L^-1/2", "depth", forward(residual=(0, -0.5)), "change/block@1"),
    ("block lr x 1/m_L", "depth", scaled(hidden_matrix=("lr", 0, -1)), "spectral_change/hidden@10"),
    ("block lr x m_L", "depth", scaled(hidden_matrix=("lr", 0, 1)), "change/residual@10"),
    ("hidden lr without 1/m_N", "width", scaled(hidden_matrix=("lr", 1, 0)), "spectral_change/hidden@10"),
    ("hidden lr 1/m_N^2", "width", scaled(hidden_matrix=("lr", -1, 0)), "spectral_change/hidden@10"),
    ("hidden init without 1/m_N", "width", scaled(hidden_matrix=("init_std", 0.5, 0)), "spectral/hidden@0"),
    ("hidden init 1/m_N", "width", scaled(hidden_matrix=("init_std", -0.5, 0)), "spectral/hidden@0"),
    ("readout without 1/m_N", "width", forward(output=(0, 0)), "size/logits@0"),
    ("readout 1/m_N^1/2", "width", forward(output=(-0.5, 0)), "size/logits@0"),
    ("embedding lr x 1/m_N", "width", scaled(embedding=("lr", -1, 0)), "change/embedding@10"),
    ("embedding multiplier m_N^1/2", "width", forward(embedding=(0.5, 0)), "size/embedding@10"),
    ("unembedding init 1/m_N", "width", scaled(unembedding=("init_std", -1, 0)), "size/logits@0"),
]


@pytest.mark.parametrize(("family", "wrong", "gate"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_each_wrong_multiplier_turns_a_gate_red(family: str, wrong: Wrong, gate: str) -> None:
    """Of one seed, up to the step of the gate."""
    (red,) = (g for g in GATES[family] if f"{g.quantity}@{g.step}" == gate)
    steps = STEPS[: STEPS.index(red.step) + 1]
    right, found = (slopes(family, "completep", which, seeds=SEEDS[:1], steps=steps) for which in (RIGHT, wrong))
    assert red.holds(right[red.quantity, red.step])
    assert not red.holds(found[red.quantity, red.step])


def test_attention_logits_fall_with_head_dim_at_initialisation_and_only_under_mup_scaling() -> None:
    """Random queries and keys agree as sqrt(head_dim): 1/head_dim leaves head_dim^-1/2, 1/sqrt(head_dim) nothing."""
    gate = Gate("size/attention_logits", 0, -0.65, -0.35)
    assert gate.holds(slopes("head_dim", "completep", steps=(0,))["size/attention_logits", 0])
    # the scale without its sqrt(base_head_dim / head_dim)
    usual = Wrong(forward=lambda m, _n, _l: replace(m, attention=math.sqrt(m.attention / math.sqrt(HEADS[0]))))
    assert not gate.holds(slopes("head_dim", "completep", usual, steps=(0,))["size/attention_logits", 0])


@pytest.mark.parametrize(("family", "wrong"), [("width", scaled(hidden_matrix=("eps", 1, 0)))])
def test_an_eps_as_large_as_the_gradient_must_shrink_with_it(family: str, wrong: Wrong) -> None:
    """With the usual tiny eps no coordinate shows it; here eps is of the gradient's size."""
    right, unscaled = (slopes(family, "completep", which, 1e-3, steps=STEPS[:2]) for which in (RIGHT, wrong))
    quantity = ("spectral_change/hidden", 1)
    assert abs(right[quantity]) < 0.25
    assert unscaled[quantity] < right[quantity] - 0.3


def test_a_slope_is_a_power_law_exponent() -> None:
    assert slope((2, 4, 8), (3.0, 1.5, 0.75)) == pytest.approx(-1)
    assert slope((10, 1000), (5.0, 5.0)) == pytest.approx(0, abs=1e-12)
    for broken in (math.nan, math.inf, 0.0):
        assert math.isnan(slope((2, 4, 8), (1.0, broken, 1.0)))
        assert not Gate("x", 0, -1, 1).holds(slope((2, 4, 8), (1.0, broken, 1.0)))


@pytest.fixture
def model(make_model: Callable[..., CausalLM]) -> CausalLM:
    return make_model(num_key_value_heads=2)


def test_activations_are_what_the_forward_computes(model: CausalLM) -> None:
    tokens = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(0))
    seen = activations(model, tokens)
    assert {name: len(found) for name, found in seen.items()} == {
        "embedding": 1, "attention_logits": 3, "attention": 3, "mlp": 3, "block": 3, "residual": 1, "logits": 1,
    }  # fmt: skip
    stream = seen["embedding"][0] + sum(seen["block"])
    torch.testing.assert_close(stream, seen["residual"][0])
    torch.testing.assert_close(model.model.norm(seen["residual"][0]), model.model(tokens))
    torch.testing.assert_close(seen["logits"][0], model(tokens))
    branches = seen["attention"][0] + seen["mlp"][0]
    torch.testing.assert_close(branches / 3, seen["block"][0])  # 1/3: the residual multiplier
    assert seen["attention_logits"][0].shape == (2, 4, 7, 7)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("shape", "logits"), [({"family": "mixit"}, False), ({"family": "sas"}, True)], ids=str)
def test_attention_without_queries_has_no_logits_to_check(
    make_model: Callable[..., CausalLM], shape: dict[str, Any], logits: bool
) -> None:
    model = make_model(**shape)
    tokens = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(0))
    found = coordinate_check(model, torch.optim.SGD(model.parameters(), lr=0.01), tokens, tokens.roll(-1, 1), (0, 1))
    gated = {gate.quantity for gates in GATES.values() for gate in gates}
    assert gated <= set(found[1])
    assert ({"size/attention_logits", "change/attention_logits"} <= set(found[1])) is logits
    assert found[1]["change/attention"] > 0
