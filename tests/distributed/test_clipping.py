"""Clipping by the base-equivalent norm: every ZeRO stage does what plain PyTorch does with whole gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.checkpoint import resume
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.plain import PlainEngine
from tests.distributed.conftest import save, state_after

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from plumbline.launcher.runtime.config.schema import Config
    from plumbline.launcher.runtime.ranks.world import World
    from plumbline.launcher.runtime.run.inputs import Inputs
    from tests.conftest import Run
    from tests.distributed.conftest import TrainMatrix

BASE = ["optimizer.grad_clip_norm=base", "optimizer.grad_clip=0.3", "train.steps=10"]
STAGES = {f"fp32_{stage}": [*BASE, f"deepspeed.zero_stage={stage}"] for stage in range(4)}
OTHERS = {
    "bf16_1": [*BASE, "deepspeed.precision=bf16", "deepspeed.zero_stage=1"],
    "offload_2": [*BASE, "deepspeed.zero_stage=2", "deepspeed.offload_optimizer=true"],
}


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, BASE)


@pytest.fixture(scope="module")
def runs(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str], Run]:
    return train_matrix(tiny_config, STAGES | OTHERS)


def expected_norm(engine: PlainEngine, config: Config) -> float:
    """Return the base-equivalent norm from whole gradients, tensor by tensor."""
    growth = {row.name: row.gradient_growth for row in plan_run(config).rows}
    squares = [(engine.gradient(name).norm() / growth[name]) ** 2 for name in growth]
    return float(torch.stack(squares).sum().sqrt())


def test_the_norm_is_that_of_the_base_and_the_gradient_keeps_its_direction(
    config: Config, tiny_config: Path, world: World
) -> None:
    found: dict[str, float] = {}
    gradients: list[torch.Tensor] = []

    class Look:
        """Look at gradients before they are clipped."""

        def before_update(self) -> None:
            found["expected"] = expected_norm(engine, config)
            gradients.extend(engine.gradient(row.name).clone() for row in plan_run(config).rows)

        def after_update(self) -> None:
            after = [engine.gradient(row.name) for row in plan_run(config).rows]
            factors = {round((b.norm() / a.norm()).item(), 6) for a, b in zip(gradients, after, strict=True)}
            assert factors == {round(config.optimizer.grad_clip / found["expected"], 6)}

    engine = PlainEngine(config, world)
    batches = TrainBatches(config.data, config.run.seed).micro_batches(0)
    norm = engine.train_step(batches, 0, 1e-3, [Look()]).result.grad_norm
    assert norm == pytest.approx(found["expected"], rel=1e-6)
    assert norm > config.optimizer.grad_clip, "the limit binds"
    plain = PlainEngine(load_config(tiny_config, []), world).train_step(batches, 0, 1e-3).result.grad_norm
    assert abs(norm / plain - 1) > 0.1, "it is not the plain norm"


@pytest.mark.parametrize("name", [*list(STAGES)[1:], "offload_2"])
def test_stages_clip_alike(runs: Callable[[str], Run], name: str) -> None:
    one, other = runs("fp32_0"), runs(name)
    assert min(one.column("grad_norm").values()) > 0.3, "the limit binds at every step"
    for key, tolerance in (("loss", 1e-6), ("grad_norm", 1e-5)):
        assert other.column(key) == pytest.approx(one.column(key), rel=tolerance), key
    for tensor, weight in one.weights(10).items():
        torch.testing.assert_close(other.weights(10)[tensor], weight, rtol=1e-4, atol=5e-5, msg=tensor)


def test_bf16_at_stage_1_clips_likewise(runs: Callable[[str], Run]) -> None:
    exact, rounded = runs("fp32_1"), runs("bf16_1")
    assert rounded.column("loss") == pytest.approx(exact.column("loss"), rel=0.005)
    assert rounded.column("grad_norm") == pytest.approx(exact.column("grad_norm"), rel=0.15)


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (1, "bf16"), (3, "fp32")])
def test_a_resumed_run_clips_as_its_configuration_says(
    tiny_config: Path, tmp_path: Path, inputs: Inputs, world: World, stage: int, precision: str
) -> None:
    """DeepSpeed keeps the limit in its checkpoints and would bring the old one back."""
    engine_keys = [f"deepspeed.zero_stage={stage}", f"deepspeed.precision={precision}"]
    tight = load_config(tiny_config, [*engine_keys, "optimizer.grad_clip=1.0e-6"])
    loose = load_config(tiny_config, [*engine_keys, "optimizer.grad_clip=1.0"])
    engine = DeepSpeedEngine(tight, world)
    engine.train_step(inputs.train.micro_batches(0), 0, 0.0)
    folder = save(engine, tight, state_after(1, inputs), tmp_path, world)
    moments = []
    for config in (tight, loose):
        engine = DeepSpeedEngine(config, world)
        resume.load(engine, folder)
        engine.train_step(inputs.train.micro_batches(1), 1, 0.0)
        averages = [state["exp_avg"] for state in engine._engine.optimizer.optimizer.state.values()]
        moments.append(max(average.abs().max().item() for average in averages))
    assert moments[1] > 100 * moments[0], "a loose limit lets the gradient through"
