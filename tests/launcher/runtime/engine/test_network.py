"""Say what a rank sends and how long a step takes; test_step_budget.py compares the messages with real ones."""

from pathlib import Path

import pytest

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.network import Machine, Messages, messages, step_time
from plumbline.model.flops import training_flops_per_token

MACHINE = Machine(devices=4, flops=1e9, bandwidth=1e6)


def test_a_ring_sends_what_it_sums_twice_and_what_it_divides_or_gathers_once() -> None:
    assert Messages(reduced=100.0, scattered=10.0, gathered=1.0).sent(4) == pytest.approx(0.75 * (200 + 10 + 1))
    assert Messages(reduced=100.0, scattered=10.0, gathered=1.0).sent(1) == 0.0


def test_a_model_that_does_not_stay_gathered_is_gathered_for_every_pass(tiny_config: Path) -> None:
    config = load_config(tiny_config, ["deepspeed.zero_stage=3", "deepspeed.precision=bf16"])
    assert messages(config, 10**9, 3, 4).gathered == 2e9
    assert messages(config, 10**9 + 2, 3, 4).gathered == 8 * 2 * (10**9 + 2)


def test_a_step_is_arithmetic_and_messages(tiny_config: Path) -> None:
    config = load_config(tiny_config, ["data.micro_batch_size=1"])
    found = step_time(config, 1000, 1, "none", MACHINE)
    flops = training_flops_per_token(config.model, config.data.sequence_length, config.objective)
    assert found.compute_seconds == pytest.approx(config.data.batch_plan.tokens_per_step * flops / 4e9)
    assert found.sent_bytes == pytest.approx(0.75 * (2 * 4000 + 4000))
    assert found.network_seconds == pytest.approx(found.sent_bytes / 1e6)
    assert found.seconds == pytest.approx(found.compute_seconds + found.network_seconds)
    twice = [step_time(config, 1000, 2, "none", MACHINE), step_time(config, 1000, 1, "none", MACHINE)]
    assert config.data.accumulation_steps(4) == 2
    assert twice[0].sent_bytes - twice[1].sent_bytes == pytest.approx(0.75 * 2 * 4000), "stage 2 sums every micro-batch"


@pytest.mark.parametrize(("recomputed", "factor"), [("selective", 1.0), ("full", 4 / 3), (1, 4 / 3), (4, 1 + 1 / 12)])
def test_what_is_computed_again_takes_its_share_of_a_forward_pass(
    tiny_config: Path, recomputed: str, factor: float
) -> None:
    config = load_config(tiny_config, [])
    plain = step_time(config, 1000, 1, "none", MACHINE).compute_seconds
    assert step_time(config, 1000, 1, recomputed, MACHINE).compute_seconds == pytest.approx(factor * plain)  # type: ignore[arg-type]
