"""A program for tests to start on three ranks: bits that one of them alone has wrong, in whatever all keep whole.

    diverge.py CONFIG FOLDER

Rank 0 writes FOLDER/compared.json: for each setting of SETTINGS what was compared, and what the guard said of each
injected difference. Then all train the run FOLDER/runs/diverged, in which a bit of rank 2 turns in step 13.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks.checksum import WORDS
from plumbline.launcher.runtime.ranks.world import read_world
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.train.guards.guard import TrainingError
from plumbline.launcher.runtime.train.guards.replicas import Replicas
from tests.distributed.rank_program import begin, leave, train

SETTINGS = {
    "0 fp32": ["deepspeed.zero_stage=0", "train.ema_half_life_tokens=1000"],
    "0 bf16, SOAP": ["deepspeed.zero_stage=0", "deepspeed.precision=bf16", "optimizer.name=soap"],
    "1 bf16": ["deepspeed.precision=bf16"],
    "1 fp32, Muon": ["deepspeed.zero_stage=1", "optimizer.name=muon"],
    "2 bf16": ["deepspeed.zero_stage=2", "deepspeed.precision=bf16"],
    "3 fp32": ["deepspeed.zero_stage=3"],
}
STEPS = 3


def turn_bit(tensor: Tensor, bit: int = 0) -> None:
    """Turn a bit of the middle word of a tensor; once more turns it back."""
    words = tensor.detach().view(-1).view(WORDS[tensor.element_size()])
    words[words.numel() // 2] ^= 1 << bit


def said(action: Callable[[], None]) -> str | None:
    """Return what the guard says, if it ends the run."""
    try:
        action()
    except TrainingError as error:
        return str(error)
    return None


def compare(file: Path, overrides: list[str]) -> dict[str, Any]:
    """Train a little, then let ranks differ in one tensor after the other."""
    world = read_world()
    config = load_config(file, overrides)
    inputs = open_inputs(config, world)
    engine = DeepSpeedEngine(config, world)
    guard = Replicas(engine, interval=1)
    clean = []
    for step in range(STEPS):
        engine.train_step(inputs.train.micro_batches(step), step, 1e-3)
        guard.before_step(step + 1, 3)
        clean.append(said(guard.after_update))
    replicas = dict(engine.replicas())
    errors = {}
    for name, tensor in replicas.items():
        if world.rank == 1:
            turn_bit(tensor)
        errors[name] = said(guard.after_update)
        if world.rank == 1:
            turn_bit(tensor)
    first = next(iter(replicas))
    turn_bit(replicas[first], bit=world.rank)
    nobody = said(guard.after_update)
    turn_bit(replicas[first], bit=world.rank)
    clean.append(said(guard.after_update))
    engine.groups[0]["lr"] *= 1 + world.rank // 2
    rates = said(guard.after_update)
    return {"clean": clean, "errors": errors, "nobody": nobody, "rates": rates}


def main() -> int:
    file, folder, world = begin()
    batch = ["data.global_batch_size=6"]
    found = {name: compare(file, [*batch, *overrides]) for name, overrides in SETTINGS.items()}
    if world.is_main:
        (folder / "compared.json").write_text(json.dumps(found))

    train_step = DeepSpeedEngine.train_step

    def struck(engine: DeepSpeedEngine, micro_batches: list[Any], step: int, *rest: Any) -> Any:
        made = train_step(engine, micro_batches, step, *rest)
        if step + 1 == 13 and world.rank == 2:
            turn_bit(engine.model.get_parameter("model.norm.weight"))
        return made

    DeepSpeedEngine.train_step = struck  # type: ignore[method-assign, assignment]
    torch.manual_seed(0)
    run = [f"run.root={folder / 'runs'}", "run.name=diverged", "deepspeed.zero_stage=0", *batch]
    return train(file, run)


if __name__ == "__main__":
    leave(main())
