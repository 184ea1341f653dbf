"""A program for tests to start on 3 or 4 ranks: bits of gradients that turn on one of them, and many replays without.

    flip.py CONFIG FOLDER

Rank 0 writes FOLDER/trials.json: for each setting what the guard said of clean steps, and each trial with what came of
it. Then all train the run FOLDER/runs/flipped, in which rank 1 is node n1 of a Slurm job, and a bit turns in step 8.
"""

import itertools
import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.make import make_engine
from plumbline.launcher.runtime.ranks.checksum import WORDS
from plumbline.launcher.runtime.ranks.world import read_world
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.system import determinism
from plumbline.launcher.runtime.train.guards.guard import WrongNodeError
from plumbline.launcher.runtime.train.guards.replay import Replay
from tests.distributed.rank_program import begin, leave, train

ANY_RANKS = "run.reproducible=any_ranks"
LOOKAHEAD = ["objective.name=latent_lookahead", "objective.horizon=2", "objective.anchors=4"]
SETTINGS: Mapping[int, Mapping[str, tuple[int, int, list[str]]]] = {
    3: {
        "0 fp32": (20, 0, ["deepspeed.zero_stage=0"]),
        "0 bf16": (20, 30, ["deepspeed.zero_stage=0", "deepspeed.precision=bf16"]),
        "1 fp32, dropout, tied": (
            20, 0, ["model.dropout=0.1", "model.tie_word_embeddings=true", "data.micro_batch_size=1"]
        ),
        "1 bf16": (20, 40, ["deepspeed.precision=bf16"]),
        "2 fp32": (20, 30, ["deepspeed.zero_stage=2"]),
        "2 bf16, lookahead, recomputed": (
            20, 0, ["deepspeed.zero_stage=2", "deepspeed.precision=bf16", "train.activation_checkpointing=full",
                    *LOOKAHEAD],
        ),
    },
    4: {
        "any ranks, 1 fp32, dropout": (20, 0, [ANY_RANKS, "model.dropout=0.1", "data.micro_batch_size=1"]),
        "any ranks, 2 bf16": (20, 30, [ANY_RANKS, "deepspeed.zero_stage=2", "deepspeed.precision=bf16"]),
    },
}  # fmt: skip
"""Ranks -> name -> steps without a fault, trials with one, overrides."""
GUARDED = ["run.deterministic=true", "guards.replay_interval=4"]
MOMENTS = {"while it trains": {0}, "while it replays": {1}, "always": {0, 1, 2}}
"""Which of the gradients of a tensor that a rank computes in a step are wrong: its own, then those of other ranks."""


class Fault:
    """Turn a bit of a gradient of a tensor, as a broken device would; hooks before any other see to it."""

    def __init__(self, engine: Engine) -> None:
        self.trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
        self.place: tuple[int, int, int] | None = None  # tensor, word, bit
        self.moments: set[int] = set()
        self.computed = 0
        for number, parameter in enumerate(self.trained):
            parameter.register_hook(lambda gradient, number=number: self._turn(gradient, number))

    def _turn(self, gradient: Tensor, number: int) -> Tensor | None:
        if self.place is None or self.place[0] != number:
            return None
        self.computed += 1
        if self.computed - 1 not in self.moments:
            return None
        _, word, bit = self.place
        wrong = gradient.clone(memory_format=torch.contiguous_format)
        words = wrong.view(-1).view(WORDS[wrong.element_size()])
        words[word] ^= 1 << bit if bit < 8 * words.element_size() - 1 else -(1 << bit)
        return wrong


def strike(file: Path, steps: int, trials: int, overrides: list[str]) -> dict[str, Any]:
    """Train without a fault, then with one in each step, and tell what the guard says."""
    world = read_world()
    config = load_config(file, [*GUARDED, f"data.global_batch_size={2 * world.size}", *overrides])
    inputs = open_inputs(config, world)
    engine = make_engine(config, world)
    guard, fault = Replay(engine, interval=1), Fault(engine)
    update, updates = engine._update, itertools.count()
    engine._update = lambda: (next(updates), update())[1]  # type: ignore[method-assign]
    draw = random.Random(1)
    found: dict[str, Any] = {"alarms": [], "compared": 0, "trials": []}
    for step in range(steps + trials):
        micro_batches = inputs.train.micro_batches(step)
        chosen = None
        if step >= steps:
            number = draw.randrange(len(fault.trained))
            bits = 8 * fault.trained[number].element_size()
            place = number, draw.randrange(fault.trained[number].numel()), draw.randrange(bits)
            chosen = draw.randrange(world.size), draw.choice(sorted(MOMENTS)), place
        if chosen is not None and chosen[0] == world.rank:
            fault.place, fault.moments, fault.computed = chosen[2], MOMENTS[chosen[1]], 0
        guard.before_step(step + 1, len(micro_batches))
        error = None
        try:
            engine.train_step(micro_batches, step, 1e-3 if chosen is None else 0.0, [guard])
        except WrongNodeError as caught:
            error = str(caught)
            engine._update()  # the one of this step, at a rate of zero: the engine is ready for the next trial
        fault.place = None
        if chosen is None:
            found["alarms"] += [error] if error else []
            found["compared"] += world.size
        else:
            found["trials"].append({"rank": chosen[0], "moment": chosen[1], "place": chosen[2], "error": error})
    found["updates"] = next(updates)
    return found


def main() -> int:
    file, folder, world = begin()
    determinism.enforce(True, world.device)
    found = {name: strike(file, *setting) for name, setting in SETTINGS[world.size].items()}
    if world.is_main:
        (folder / "trials.json").write_text(json.dumps(found))

    train_step, faults = DeepSpeedEngine.train_step, []

    def struck(engine: DeepSpeedEngine, micro_batches: list[Any], step: int, *rest: Any) -> Any:
        if step == 0:
            faults.append(Fault(engine))
        if step + 1 == 8:
            os.environ.update(SLURM_JOB_ID="7", SLURMD_NODENAME=f"n{world.rank}")
            faults[0].place, faults[0].moments = (3, 5, 0), {0} if world.rank == 1 else set()
        return train_step(engine, micro_batches, step, *rest)

    DeepSpeedEngine.train_step = struck  # type: ignore[method-assign, assignment]
    run = [f"run.root={folder / 'runs'}", "run.name=flipped", "checkpoint.interval=2", *GUARDED]
    run += [f"data.global_batch_size={2 * world.size}", *([ANY_RANKS] if world.size == 4 else [])]
    return train(file, run)


if __name__ == "__main__":
    leave(main())
