"""The published laws in literal numbers; which proportions of a run deserve a word, and which do not."""

from dataclasses import replace
from typing import Any

import pytest

from plumbline.launcher.runtime.config.parse import parse
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.remarks import cautions
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.proportions import Proportions, best_batch_tokens, best_tau

USUAL = Proportions(tokens=8_000_000_000, batch_tokens=400_000, tokens_per_parameter=20.0, tau=0.22, warmup_share=0.05)


def test_the_laws_in_numbers() -> None:
    assert best_tau(20) == pytest.approx(0.2236, rel=1e-3)
    assert best_tau(200) == pytest.approx(0.2236 * 10**-0.527, rel=1e-3)
    assert best_batch_tokens(8_000_000_000) == pytest.approx(190 * 2048, rel=0.01)
    assert best_batch_tokens(80_000_000_000) / best_batch_tokens(8_000_000_000) == pytest.approx(10**0.383)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"tau": None}, []),
        ({"tau": 0.8}, []),
        ({"tau": 2.2}, ["is 2.2, the best at 20 tokens per parameter about 0.22"]),
        ({"tau": 0.0096}, ["set horizon.tau=0.22"]),
        ({"tau": 0.02, "tokens_per_parameter": 1280.0}, []),
        ({"warmup_share": 0.175}, ["schedule.warmup lasts 17.50% of the steps"]),
        ({"warmup_share": 0.0008}, ["published runs take 0.1% to 10%"]),
        ({"warmup_share": 0.1}, []),
        ({"batch_tokens": 4_000_000}, ["a batch of 4,000,000 tokens"]),
        ({"batch_tokens": 40_000}, ["change data.global_batch_size"]),
        ({"tokens_per_parameter": 11.0}, []),
        ({"tokens_per_parameter": 0.4}, ["0.4 tokens per parameter"]),
        ({"tokens_per_parameter": 5000.0, "tau": 9.0, "batch_tokens": 8}, ["are known for 20 to 1280"]),
        ({"tau": 2.2, "warmup_share": 0.2}, ["schedule.warmup", "horizon.tau"]),
    ],
)
def test_what_is_far_from_the_known_ranges_is_told(change: dict[str, Any], words: list[str]) -> None:
    told = list(replace(USUAL, **change).cautions())
    assert len(told) == len(words)
    for sentence, part in zip(told, words, strict=True):
        assert part in sentence


def values(source: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": "x"},
        "model": {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "parameterization": {"rule": "sp"},
        "data": {"train": [source], "sequence_length": 8, "global_batch_size": 4, "micro_batch_size": 1},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup": "10 steps"},
        "train": {"steps": 200},
        **sections,
    }


TEXT = {"path": "nowhere"}


def test_a_plan_has_the_proportions_of_its_run() -> None:
    config = parse(Config, values(TEXT, optimizer={"lr": 0.01, "weight_decay": 0.5}), "test")
    plan = plan_run(config)
    parts, per_parameter = plan.proportions, 6400 / sum(row.count for row in plan.rows)
    assert (parts.tokens, parts.batch_tokens, parts.warmup_share) == (6400, 32, 0.05)
    assert parts.tokens_per_parameter == per_parameter
    assert parts.tau == pytest.approx(1 / (0.01 * 0.5 * 200))
    assert str(parts) == f"tau 1, warm-up 5.00% of the steps, {per_parameter:.3g} tokens per parameter"
    none = plan_run(parse(Config, values(TEXT, optimizer={"lr": 0.01, "weight_decay": 0.0}), "test"))
    assert none.proportions.tau is None
    assert str(none.proportions).startswith("no weight decay, ")


def test_a_run_on_synthetic_tasks_alone_hears_nothing_of_ranges_for_text() -> None:
    text = parse(Config, values(TEXT), "test")
    (caution,) = cautions(text, plan_run(text))
    assert "tokens per parameter" in caution
    task = parse(Config, values({"task": {"name": "retrieval", "pairs": 2}}), "test")
    assert list(cautions(task, plan_run(task))) == []


def test_what_an_objective_warns_of_is_told() -> None:
    task = {"task": {"name": "retrieval", "pairs": 2}}
    fixed = {"name": "latent_lookahead", "growth": "fixed"}
    config = parse(Config, values(task, objective={**fixed, "detach_states": True}), "test")
    (caution,) = cautions(config, plan_run(config))
    assert "objective.growth = fixed with detach_states = true: no gradient reaches" in caution
    kept = parse(Config, values(task, objective=fixed), "test")
    assert list(cautions(kept, plan_run(kept))) == []


def test_a_weight_decay_that_tau_overrides_is_told() -> None:
    task = {"task": {"name": "retrieval", "pairs": 2}}
    config = parse(Config, values(task, optimizer={"lr": 0.01, "weight_decay": 0.2}, horizon={"tau": 0.2}), "test")
    (caution,) = cautions(config, plan_run(config))
    assert "optimizer.weight_decay = 0.2 has no effect: horizon.tau = 0.2 sets the decay" in caution
    kept = parse(Config, values(task, horizon={"tau": 0.2}), "test")
    assert list(cautions(kept, plan_run(kept))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"horizon": {"base_tokens": 1000}},
            "horizon.base_tokens = 1000 has no effect: horizon.rule = none; leave it out, or set horizon.rule to "
            "complete_dp or power_law",
        ),
        (
            {"horizon": {"rule": "complete_dp", "base_tokens": 9, "base_batch_tokens": 9, "lr_batch_exponent": 0.4}},
            "horizon.lr_batch_exponent = 0.4 has no effect: horizon.rule = complete_dp; leave it out, or set "
            "horizon.rule to power_law",
        ),
        (
            {"schedule": {"name": "cosine", "decay": "50%", "cooldown": "square", "final_lr_fraction": 0.1}},
            "schedule.name = cosine: schedule.decay = 50%, schedule.cooldown = square without effect",
        ),
        (
            {"schedule": {"name": "constant", "final_lr_fraction": 0.1}},
            "schedule.name = constant: schedule.final_lr_fraction = 0.1 without effect",
        ),
        (
            {"schedule": {"lr_scaling": "sqrt"}},
            "schedule.lr_scaling = sqrt without effect: there is no data.batch_size_warmup",
        ),
    ],
)
def test_keys_without_effect_are_told(changes: dict[str, Any], words: str) -> None:
    config = parse(Config, values({"task": {"name": "retrieval", "pairs": 2}}, **changes), "test")
    assert words in list(cautions(config, plan_run(config)))


def test_keys_with_effect_are_not_told() -> None:
    rule = {"rule": "power_law", "base_tokens": 9, "base_batch_tokens": 9, "lr_batch_exponent": 0.4}
    phases = {"decay": "50%", "cooldown": "square", "final_lr_fraction": 0.1}
    config = parse(Config, values({"task": {"name": "retrieval", "pairs": 2}}, horizon=rule, schedule=phases), "test")
    assert list(cautions(config, plan_run(config))) == []


def test_a_watchdog_that_torch_would_be_ahead_of_is_told() -> None:
    task = {"task": {"name": "retrieval", "pairs": 2}}
    config = parse(Config, values(task, train={"steps": 10, "hang_minutes": 30.0}), "test")
    (caution,) = cautions(config, plan_run(config))
    assert "train.hang_minutes = 30 is not below deepspeed.timeout_minutes = 30" in caution
    assert caution.endswith("set deepspeed.timeout_minutes=45")
    for minutes in (29.0, None):
        kept = parse(Config, values(task, train={"steps": 10, "hang_minutes": minutes}), "test")
        assert list(cautions(kept, plan_run(kept))) == []
