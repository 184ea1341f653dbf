"""The ladder carries what its base was tuned with: tau, warm-up and tokens per parameter stay, lr follows its rule."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import RunPlan, plan_run
from plumbline.launcher.runtime.config.remarks import cautions
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.proportions import best_batch_tokens, best_tau
from tests.benchmarks import ladder_table

BASE, *RUNGS = ladder_table.rungs()
README = ladder_table.CONFIGS / "README.md"


@functools.cache
def planned(path: Path) -> tuple[Config, RunPlan]:
    config = load_config(path, [], min)
    return config, plan_run(config)


def test_the_ladder_is_all_there() -> None:
    assert [path.stem for path in RUNGS] == ["80m", "160m", "400m", "830m", "1.4b", "3b", "7b"]


@pytest.mark.parametrize("path", [BASE, *RUNGS], ids=lambda path: path.stem)
def test_what_relates_the_parts_of_a_run_is_that_of_the_base(path: Path) -> None:
    (config, plan), (_, base) = planned(path), planned(BASE)
    parts = plan.proportions
    assert parts.tau == pytest.approx(base.proportions.tau, rel=0.003)
    assert parts.warmup_share == pytest.approx(0.05, abs=0.5 / plan.total_steps)
    assert parts.tokens_per_parameter == pytest.approx(20, rel=0.003)
    assert 0.94 < parts.batch_tokens / best_batch_tokens(parts.tokens) < (2.75 if path == RUNGS[-1] else 1.9)
    m_b, m_d = parts.batch_tokens / base.proportions.batch_tokens, parts.tokens / base.proportions.tokens
    assert plan.settings.lr == pytest.approx(base.settings.lr * m_b**0.5 * m_d**-0.32)
    assert replace(plan.settings, lr=0, weight_decay=0) == replace(base.settings, lr=0, weight_decay=0)
    assert list(cautions(config, plan)) == []


@pytest.mark.parametrize("path", [BASE, *RUNGS], ids=lambda path: path.stem)
def test_powers_of_two_and_three_times_them_divide_a_batch(path: Path) -> None:
    data = planned(path)[0].data
    assert data.micro_batch_size is not None
    micro_batches, rest = divmod(data.global_batch_size, data.micro_batch_size)
    assert rest == 0
    assert micro_batches in {3 * 2**k for k in range(2, 10)}


def test_the_largest_model_has_a_batch_for_many_ranks() -> None:
    assert 2e6 <= planned(RUNGS[-1])[1].proportions.batch_tokens <= 4e6


@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_a_rung_inherits_everything_that_is_tuned(path: Path) -> None:
    (rung, _), (base, _) = planned(path), planned(BASE)
    for section in ("parameterization", "precision", "objective", "optimizer", "horizon", "schedule"):
        assert getattr(rung, section) == getattr(base, section)
    assert rung.model.initializer_range == base.model.initializer_range
    assert rung.model.head_dim == base.model.head_dim
    assert rung.model.intermediate_size == 3 * rung.model.hidden_size


def test_the_base_is_what_the_horizon_says_it_was_tuned_with() -> None:
    config = load_config(BASE, [])
    plan, horizon = plan_run(config), config.horizon
    assert horizon.base_batch_tokens == plan.batch_plan.tokens_per_step
    assert horizon.base_tokens == plan.total_tokens == config.train.tokens
    assert plan.settings.lr == config.optimizer.lr, "to the last bit"
    assert plan.proportions.tau == pytest.approx(horizon.tau, rel=2e-3)
    assert horizon.tau == pytest.approx(best_tau(20), rel=0.02)
    assert config.parameterization.base_hidden_size == config.model.hidden_size
    assert config.parameterization.base_num_hidden_layers == config.model.num_hidden_layers


def test_off_the_ladder_tau_and_lr_follow_their_laws() -> None:
    _, base = planned(BASE)
    longer = plan_run(load_config(BASE, ["train.tokens=5768478720", "data.global_batch_size=384"]))
    assert longer.proportions.tau == pytest.approx(0.22 * (200 / 20) ** -0.527, rel=2e-3)
    assert longer.settings.lr == pytest.approx(base.settings.lr * 2 * 10**-0.32, rel=1e-3)
    assert longer.proportions.warmup_share == pytest.approx(0.05, abs=1e-3)


def test_the_table_of_the_documents_is_that_of_the_files() -> None:
    assert ladder_table.table() in README.read_text(encoding="utf-8"), "run python tests/benchmarks/ladder_table.py"
