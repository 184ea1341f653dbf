"""Factors and options of a user's own on top of the table: every quantity, by role or name, at any width."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.objectives.latent_lookahead import LatentLookaheadConfig
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.table import parameter_table

MakeConfig = Callable[..., ModelConfig]
BASE = OptimizerSettings(lr=0.01, weight_decay=0.1, eps=1e-8)
RULE: dict[str, Any] = {"rule": "completep", "base_hidden_size": 32, "base_num_hidden_layers": 3}


def table(model: ModelConfig, **changes: Any) -> dict[str, ParameterRow]:
    rule = ParameterizationConfig.model_validate({**RULE, **changes})
    return {row.name: row for row in parameter_table(model, rule, BASE)}


@pytest.mark.parametrize(
    ("key", "column"),
    [("weight_decay_multipliers", "weight_decay"), ("init_multipliers", "init_std"), ("eps_multipliers", "eps")],
)
def test_every_quantity_has_factors_of_its_own(make_config: MakeConfig, key: str, column: str) -> None:
    model = make_config(hidden_size=64)
    plain = table(model)
    own = table(model, **{key: {"hidden_matrix": 3.0, r".*\.(up|down)_proj\.weight": 0.5, "lm_head.weight": 7}})
    factors = {"self_attn.q_proj": 3.0, "mlp.up_proj": 1.5, "lm_head": 7.0, "embed_tokens": 1.0}
    for end, factor in factors.items():
        name = next(name for name in plain if name.endswith(f"{end}.weight"))
        before, after = asdict(plain[name]), asdict(own[name])
        assert after.pop(column) == pytest.approx(before.pop(column) * factor, rel=1e-12)
        assert after == before, "nothing else changes"
    with pytest.raises(ValueError, match=rf"parameterization\.{key}: down_proj matches no parameter"):
        table(model, **{key: {"down_proj": 2.0}})
    with pytest.raises(ValueError, match=rf"parameterization\.{key}: '\(' is not a regular expression"):
        table(model, **{key: {"(": 2.0}})


@torch.no_grad()
@pytest.mark.parametrize("entry", ["embedding", r"model\.embed_tokens\.weight"])
def test_a_state_becomes_an_input_of_the_size_of_an_embedding(make_config: MakeConfig, entry: str) -> None:
    model, look = make_config(), LatentLookaheadConfig()

    def sizes(**factors: float) -> tuple[float, float]:
        rule = ParameterizationConfig.model_validate({**RULE, "init_multipliers": factors})
        forward = multipliers(model, rule)
        trained = TrainedLM(model, forward, look.make(model, forward, 0))
        initialize(trained, parameter_table(model, rule, BASE, look), seed=0)
        thinker: Any = trained.get_submodule("objective.thinker")
        state = torch.randn(1, 1, 1000, model.hidden_size, generator=torch.Generator().manual_seed(0))
        fed = thinker._feed(trained.model, state) - thinker.role * trained.model.embedding_multiplier
        embedded = trained.model.embed(torch.arange(61)[None], torch.arange(61)[None])
        return float(fed.square().mean().sqrt()), float(embedded.square().mean().sqrt())

    plain, scaled = sizes(), sizes(**{entry: 10.0})
    assert plain[0] == pytest.approx(plain[1], rel=0.05)
    assert scaled == pytest.approx([10 * size for size in plain], rel=1e-4)


@pytest.mark.parametrize(
    ("entry", "shape", "named"),
    [
        ("hidden_norm", {}, "model.layers.0.input_layernorm.weight"),
        (r".*\.q_proj\.bias", {"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        ("projection", {"embedding_projection": True}, "model.embed_projection.weight"),
        ("mixing", {"family": "mixit"}, "model.layers.0.self_attn.mixing"),
    ],
)
def test_a_factor_on_values_that_it_would_not_change_is_refused(
    make_config: MakeConfig, entry: str, shape: dict[str, Any], named: str
) -> None:
    found = f"parameterization.init_multipliers: {entry} = 3 changes nothing: the first values of {named} do not"
    with pytest.raises(ValueError, match=re.escape(found)):
        table(make_config(**shape), init_multipliers={entry: 3.0})


def test_a_factor_on_a_weight_may_match_its_bias(make_config: MakeConfig) -> None:
    model = make_config(attention_bias=True)
    plain, own = table(model), table(model, init_multipliers={r".*\.q_proj\..*": 3.0})
    name = "model.layers.0.self_attn.q_proj"
    assert own[f"{name}.weight"].init_std == pytest.approx(3 * plain[f"{name}.weight"].init_std, rel=1e-12)
    assert own[f"{name}.bias"] == plain[f"{name}.bias"]


@pytest.mark.parametrize("width", [32, 128])
def test_the_table_tells_the_size_of_an_orthogonal_matrix(make_config: MakeConfig, width: int) -> None:
    model = make_config(hidden_size=width, embedding_projection=True)
    built = CausalLM(model, multipliers(model, ParameterizationConfig.model_validate(RULE)))
    rows = table(model)
    initialize(built, list(rows.values()), seed=0)
    for name in ("model.embed_projection.weight", "model.output_projection.weight"):
        drawn = built.get_parameter(name).detach().square().mean().sqrt()
        assert rows[name].init_std == pytest.approx(float(drawn), rel=1e-5)


def test_decay_and_first_values_may_be_taken_away(make_config: MakeConfig) -> None:
    rows = table(make_config(), weight_decay_multipliers={"embedding": 0.0}, init_multipliers={"unembedding": 0.0})
    assert rows["model.embed_tokens.weight"].weight_decay == 0.0
    assert rows["lm_head.weight"].init_std == 0.0


@pytest.mark.parametrize(("exponent", "growth"), [(1.0, 4.0), (0.5, 2.0), (0.0, 1.0)])
def test_the_decay_follows_its_width_exponent(make_config: MakeConfig, exponent: float, growth: float) -> None:
    model = make_config(hidden_size=128, embedding_projection=True)
    rows = table(model, weight_decay_width_exponent=exponent, output_scaling="absorbed")
    for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_projection.weight", "lm_head.weight"):
        assert rows[name].weight_decay == pytest.approx(BASE.weight_decay * growth, rel=1e-12), name
        assert rows[name].lr == pytest.approx(BASE.lr / 4, rel=1e-12)
    assert rows["model.embed_tokens.weight"].weight_decay == BASE.weight_decay


@pytest.mark.parametrize("rule", ["sp", "completep"])
@pytest.mark.parametrize("width", [32, 128])
def test_a_gain_is_the_same_at_every_width(make_config: MakeConfig, rule: str, width: int) -> None:
    rows = table(make_config(hidden_size=width, intermediate_size=3 * width), rule=rule, hidden_init_gain=0.7)
    for end, fan_in in (("q_proj", width), ("down_proj", 3 * width)):
        row = next(row for name, row in rows.items() if name.endswith(f"{end}.weight"))
        assert row.init_std == pytest.approx(0.7 / math.sqrt(fan_in), rel=1e-12)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert rows[name].init_std == 0.02


def test_a_gain_stands_below_the_other_factors(make_config: MakeConfig) -> None:
    rows = table(
        make_config(), rule="sp", hidden_init_gain=1.0, scaled_branch_init=True, init_multipliers={".*o_proj.*": 2}
    )
    assert rows["model.layers.0.self_attn.o_proj.weight"].init_std == pytest.approx(2 / math.sqrt(32 * 6), rel=1e-12)
