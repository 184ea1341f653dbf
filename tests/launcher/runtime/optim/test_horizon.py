"""Batch and horizon rules in literal numbers; the timescale as a weight-decay setting; refusals; the way into a run."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.parse import parse
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.remarks import describe_settings
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.horizon import HorizonConfig, scale_settings
from plumbline.launcher.runtime.optim.optimizer import OptimizerConfig
from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.config import OptimizerSettings
from plumbline.model.parameterization.skeleton import parameter_count

OPTIMIZER = OptimizerConfig(lr=0.01, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1)
MODEL = ModelConfig.model_validate(
    {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 8,
    }
)
BASE: dict[str, Any] = {"base_batch_tokens": 1000, "base_tokens": 100_000}  # 100 steps


def scaled(batch_tokens: int, steps: int, **changes: Any) -> OptimizerSettings:
    return scale_settings(
        OPTIMIZER, HorizonConfig.model_validate(changes), MODEL, batch_tokens, steps, batch_tokens * steps
    )


def test_without_a_rule_nothing_changes() -> None:
    assert scaled(123, 456) == OptimizerSettings(0.01, 0.1, 1e-8, (0.9, 0.95))
    assert scaled(123, 456, **BASE) == scaled(1, 1)


@pytest.mark.parametrize("rule", ["complete_dp", "power_law"])
def test_at_the_base_nothing_changes_to_the_last_bit(rule: str) -> None:
    assert scaled(1000, 100, rule=rule, **BASE) == OptimizerSettings(0.01, 0.1, 1e-8, (0.9, 0.95))


@pytest.mark.parametrize(
    ("batch_tokens", "steps", "factor", "betas"),
    [
        (1000, 400, 0.5, (0.975, 0.9875)),  # m_B 1, m_D 4
        (4000, 25, 2.0, (0.6, 0.8)),  # m_B 4, m_D 1
        (4000, 100, 1.0, (0.9, 0.95)),  # m_B 4, m_D 4: the same number of steps, and the factors cancel
        (500, 800, math.sqrt(1 / 8), (0.9875, 0.99375)),  # m_B 1/2, m_D 4
    ],
)
def test_complete_dp_follows_the_square_root_of_batch_over_tokens(
    batch_tokens: int, steps: int, factor: float, betas: tuple[float, float]
) -> None:
    found = scaled(batch_tokens, steps, rule="complete_dp", **BASE)
    assert (found.lr, found.weight_decay, found.eps) == pytest.approx((0.01 * factor, 0.1 * factor, 1e-8 / factor))
    assert found.betas == pytest.approx(betas)
    assert found.lr * found.weight_decay * steps == pytest.approx(0.01 * 0.1 * 100)  # the timescale stays


def test_power_law_uses_its_exponents_on_the_learning_rate_alone() -> None:
    found = scaled(4000, 200, rule="power_law", **BASE)  # m_B 4, m_D 8
    assert found.lr == pytest.approx(0.01 * 2 * 8**-0.32)
    assert (found.weight_decay, found.eps, found.betas) == (0.1, 1e-8, (0.9, 0.95))
    own = scaled(4000, 200, rule="power_law", lr_batch_exponent=1.0, lr_tokens_exponent=-0.5, **BASE)
    assert own.lr == pytest.approx(0.01 * 4 / math.sqrt(8))


def test_tau_is_the_fraction_of_the_run_over_which_weights_forget() -> None:
    found = scaled(1000, 500, tau=0.2)
    assert found.lr == 0.01
    assert found.weight_decay == pytest.approx(1 / (0.2 * 0.01 * 500))
    # with a rule, the learning rate that the rule gives
    ruled = scaled(1000, 400, rule="power_law", lr_tokens_exponent=-0.5, tau=0.2, **BASE)
    assert ruled.weight_decay == pytest.approx(1 / (0.2 * 0.005 * 400))


def test_tau_may_fall_with_tokens_per_parameter() -> None:
    ratio = 1000 * 500 / parameter_count(MODEL)
    settings = {"tau": 0.2, "tau_exponent": -0.527, "base_tokens_per_parameter": ratio / 4}
    assert scaled(1000, 500, **settings).weight_decay == pytest.approx(1 / (0.2 * 4**-0.527 * 0.01 * 500))


@pytest.mark.parametrize(
    "values",
    [
        {"tau": 1.0, "tau_exponent": 100.0, "base_tokens_per_parameter": 1e9},  # a timescale of zero
        {"tau": 1.0, "tau_exponent": -1000.0, "base_tokens_per_parameter": 1e9},
        {"rule": "power_law", "lr_batch_exponent": 1e9, "base_batch_tokens": 1, "base_tokens": 1},
    ],
)
def test_exponents_that_no_number_can_follow_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lr_batch_exponent = .*, tau_exponent = .*: they make the learning rate or"):
        scaled(1000, 500, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rule": "complete_dp", "base_tokens": 1}, "complete_dp needs base_batch_tokens"),
        ({"rule": "power_law", "base_batch_tokens": 1}, "power_law needs base_tokens"),
        ({"tau_exponent": -0.5}, "needs tau and base_tokens_per_parameter"),
        ({"tau": 0.1, "tau_exponent": -0.5}, "needs tau and base_tokens_per_parameter"),
        ({"tau": 0.0}, "tau"),
        ({"rule": "linear"}, "rule"),
    ],
)
def test_an_incomplete_rule_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HorizonConfig.model_validate(values)


def config_values(**horizon: Any) -> dict[str, Any]:
    return {
        "run": {"name": "x"},
        "model": MODEL.model_dump(),
        "parameterization": {"rule": "completep", "base_hidden_size": 16, "base_num_hidden_layers": 1},
        "data": {"train": [{"path": "nowhere"}], "sequence_length": 8, "global_batch_size": 4, "micro_batch_size": 1},
        "optimizer": {"lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        "train": {"steps": 200},
        "horizon": horizon,
    }


def test_a_run_scales_with_its_own_batch_and_tokens() -> None:
    config = parse(Config, config_values(rule="complete_dp", base_batch_tokens=32, base_tokens=32 * 50), "test")
    assert plan_run(config).settings.lr == pytest.approx(0.005)  # m_B 1, m_D 4
    rows = plan_run(config).rows
    matrix = next(row for row in rows if row.role == "hidden_matrix")
    assert (matrix.lr, matrix.weight_decay) == pytest.approx((0.005 / 2, 0.05 * 2))
    assert matrix.lr_multiplier == 0.5  # the group's own: the schedule's value carries the rest


def test_a_batch_that_no_beta_can_follow_is_refused_before_anything_runs() -> None:
    config = parse(Config, config_values(rule="complete_dp", base_batch_tokens=2, base_tokens=32 * 200), "test")
    with pytest.raises(ConfigError, match=r"beta 0\.9 into -0\.6 at m_B / m_D = 16: the batch is too large"):
        plan_run(config)


def test_what_the_horizon_made_of_the_settings_is_told() -> None:
    plain = parse(Config, config_values(), "test")
    assert describe_settings(plain, plan_run(plain)) == "lr 0.01, weight decay 0.1, eps 1e-08, betas 0.9/0.95"
    ruled = parse(Config, config_values(rule="complete_dp", base_batch_tokens=32, base_tokens=32 * 50), "test")
    assert describe_settings(ruled, plan_run(ruled)) == (
        "lr 0.005, weight decay 0.05, eps 2e-08, betas 0.975/0.9875; "
        "horizon complete_dp: from lr 0.01, weight decay 0.1, eps 1e-08, betas 0.9/0.95"
    )
    constant = parse(Config, config_values(tau=0.2), "test")
    assert "horizon none, tau 0.2: from lr 0.01, " in describe_settings(constant, plan_run(constant))
    grown = parse(Config, config_values(tau=0.2, tau_exponent=-0.5, base_tokens_per_parameter=20), "test")
    told = describe_settings(grown, plan_run(grown))
    assert "horizon none, tau 0.2 at 20 tokens per parameter: from lr 0.01, " in told, "and that of this run is another"
