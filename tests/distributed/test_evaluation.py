"""An evaluation that is stopped at any batch leaves the model as it was: what is saved then is what was trained."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import torch

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.plain import PlainEngine
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train.evaluation import Evaluation, StoppedError

if TYPE_CHECKING:
    from pathlib import Path

    from plumbline.launcher.runtime.engine.base import Engine
    from plumbline.launcher.runtime.ranks.world import World

OVERRIDES = ["train.eval_batches=2", "train.ema_half_life_tokens=600", "metrics.diagnostics_interval=2"]


class StopAfter(StopRequest):
    """Request to stop when so many have asked for it."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __bool__(self) -> bool:
        self.left -= 1
        return self.left < 0


def weights(engine: Engine) -> list[torch.Tensor]:
    """Return what the model computes with, then the average."""
    assert engine.ema is not None
    found = [parameter.detach().clone() for parameter in engine.model.parameters()]
    with engine.ema.in_place():
        return found + [master.detach().clone() for master in engine.master_weights()]


def test_a_stop_at_any_batch_leaves_weights_and_average_as_they_were(tiny_config: Path, world: World) -> None:
    config = load_config(tiny_config, OVERRIDES)
    inputs = open_inputs(config, world)
    engine = PlainEngine(config, world, None)
    for step in range(2):
        engine.train_step(inputs.train.micro_batches(step), step, 0.01)
    before = weights(engine)
    half = len(before) // 2
    assert any(not torch.equal(one, other) for one, other in zip(before[:half], before[half:], strict=True))

    said: list[str] = []
    for times in count():
        try:
            record = Evaluation(engine, inputs, StopAfter(times), lambda _doing: None).run(said.append)
        except StoppedError:
            assert all(torch.equal(one, other) for one, other in zip(before, weights(engine), strict=True)), times
        else:
            break
    assert {"eval/email/loss", "eval/email/w8a8_delta", "eval/email/ema_loss"} <= record.keys()
    batches = len(list(inputs.validation["email"][1]))
    assert times == batches + 2 * min(2, batches) + batches, "as they are, exact and rounded, their average"
    assert said[-1].endswith("moving average")
