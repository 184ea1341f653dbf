"""Try the guard of the table: larger models that are trained as the table says, and others in which one thing is wrong.

    python tests/benchmarks/transfer_alarm.py [--seeds 20 --steps 20]
    python tests/benchmarks/transfer_alarm.py --cost

The base has width 32 and 2 layers; the larger models have width 128 and 8 layers, and another seed each. Adam's eps is
1e-5, or the missing rule of eps would change nothing. For each way to train, one line as JSON: in how many runs the
alarm was heard, in which step at the latest, and the smallest and the largest ratio of a size to that of the base over
all roles and steps. --cost times, in the larger model, steps in which the guard looks against those in which it does
not, by processor time. docs/guards.md has the results.
"""

import argparse
import email
import json
import logging
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.launcher.runtime.config.guards import TransferConfig
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.optim.optimizer import OptimizerConfig, group_settings
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world
from plumbline.launcher.runtime.run.folder import prepare_run_folder
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.system.files import read_json_lines
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.train.guards.transfer import RATIO, Transfer
from plumbline.model.parameterization.rows import ParameterRow
from tests.distributed.trainers import make_trainer

BASE = """
run: {{name: base, root: {folder}}}
model: {{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16,
        intermediate_size: 96, vocab_size: 256, tie_word_embeddings: false}}
parameterization: {{rule: completep, base_hidden_size: 32, base_num_hidden_layers: 2}}
data: {{train: [{{path: {folder}/text}}], sequence_length: 64, global_batch_size: 16, micro_batch_size: 16}}
optimizer: {{lr: 8.0e-3, eps: 1.0e-5}}
schedule: {{warmup: 4 steps}}
train: {{steps: {steps}}}
deepspeed: {{zero_stage: 1, precision: fp32}}
metrics: {{trackers: [], diagnostics_interval: null, peak_tflops: 0.1}}
"""
LARGER = [
    "model.hidden_size=128", "model.num_attention_heads=8", "model.num_key_value_heads=8",
    "model.intermediate_size=384", "model.num_hidden_layers=8",
]  # fmt: skip

Fault = Callable[[], AbstractContextManager[Any]]
"""Returns what makes engines wrong while it is entered."""


def wrong_rows(change: Callable[[ParameterRow], ParameterRow]) -> Fault:
    """Return what gives the optimizer other rows than those of the table."""

    def changed(rows: Sequence[ParameterRow], optimizer: OptimizerConfig, betas: tuple[float, float]) -> Any:
        return group_settings([change(row) for row in rows], optimizer, betas)

    return lambda: patch("plumbline.launcher.runtime.engine.deepspeed.group_settings", changed)


def quadruple(role: str) -> Fault:
    """Return what makes the learning rate of one role four times the table's."""
    return wrong_rows(lambda row: replace(row, lr_multiplier=4 * row.lr_multiplier) if row.role == role else row)


def share_steps() -> AbstractContextManager[Any]:
    """Return what counts a step of Adam for each group in every update, as where groups share one count."""
    update = DeepSpeedEngine._update

    def wrong(engine: DeepSpeedEngine) -> tuple[Tensor, Tensor]:
        made = update(engine)
        for state in engine.optimizer_state.values():
            state["step"] += len(engine.groups) - 1
        return made

    return patch.object(DeepSpeedEngine, "_update", wrong)


WAYS: dict[str, Fault] = {
    "as the table says": nullcontext,
    "4 x lr of hidden matrices": quadruple("hidden_matrix"),
    "4 x lr of the embedding": quadruple("embedding"),
    "4 x lr of the unembedding": quadruple("unembedding"),
    "4 x lr of the blocks' norms": quadruple("hidden_norm"),
    "the eps of the base for all": wrong_rows(lambda row: replace(row, eps=1e-5)),
    "one count of Adam's steps for all groups": share_steps,
}


class Warnings(logging.Handler):
    """Collect the steps in which the guard warns."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.steps: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Read a message."""
        found = re.match(r"step (\d+): sizes of updates are not those of the base run", record.getMessage())
        self.steps += [int(found[1])] if found else []


@dataclass
class Heard:
    """Hold what the guard made of a run."""

    first: int | None
    """Step of the first warning of the guard."""
    ratios: list[float]
    """Of sizes to those of the base, over roles and steps."""


def train(config_file: Path, overrides: Sequence[str], world: World, fault: Fault = nullcontext) -> Heard:
    """Train a run; returns what the guard made of it."""
    config = load_config(config_file, list(overrides))
    inputs = open_inputs(config, world)
    prepare_run_folder(config, inputs, world)
    warnings = Warnings()
    LOG.addHandler(warnings)
    with fault():
        trainer = make_trainer(config, inputs, world)
        trainer.run()
        trainer.close()
    LOG.removeHandler(warnings)
    ratios = [
        value
        for _, record in read_json_lines(config.run.folder / "metrics.jsonl")
        for key, value in record.items()
        if key.startswith(RATIO)
    ]
    return Heard(min(warnings.steps, default=None), ratios)


def prepare(folder: Path, steps: int) -> Path:
    """Write text, and the configuration of a base; returns its file."""
    text = b"\0".join(file.read_bytes() for file in sorted(Path(email.__file__).parent.glob("*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).numpy()
    with IndexedWriter(folder / "text", token_dtype(256)) as writer:
        writer.add_documents(tokens, [len(tokens)])
    file = folder / "base.yaml"
    file.write_text(BASE.format(folder=folder, steps=steps), encoding="utf-8")
    return file


def cost(config: Config, world: World) -> dict[str, float]:
    """Return the processor time of a step, and what a look adds to it, in steps: medians of pairs."""
    inputs, engine = open_inputs(config, world), DeepSpeedEngine(config, world)
    guard, steps, more = Transfer(engine, TransferConfig()), [], []
    for step in range(0, config.train.steps or 0, 2):
        seconds = []
        for number, looked_at in ((step + 1, 3), (step + 2, 1)):  # to a guard that is told of step 1, and of step 3
            guard.before_step(looked_at, 1)
            batches, began = inputs.train.micro_batches(number - 1), time.process_time()
            engine.train_step(batches, number - 1, 1e-3, [guard])
            guard.found(looked_at)
            seconds.append(time.process_time() - began)
        steps.append(seconds[0])
        more.append(seconds[1] / seconds[0] - 1)
    return {"step, seconds": statistics.median(steps), "a look, steps": statistics.median(more)}


def main() -> None:
    """Train all ways with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cost", action="store_true", help="time a look instead")
    arguments = parser.parse_args()
    world = read_world()
    process_group.join(world, timeout_minutes=5.0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        file = prepare(folder, arguments.steps)
        if arguments.cost:
            print(json.dumps(cost(load_config(file, [*LARGER, "train.steps=64"]), world)), flush=True)
            os._exit(0)
        train(file, [], world)
        for number, (way, fault) in enumerate(WAYS.items()):
            heard = [
                train(
                    file,
                    [*LARGER, f"run.name={number}-{seed}", f"run.seed={seed}", f"guards.transfer.base={folder}/base"],
                    world,
                    fault,
                )
                for seed in range(2, 2 + arguments.seeds)
            ]
            first = [run.first for run in heard if run.first is not None]
            ratios = [ratio for run in heard for ratio in run.ratios]
            facts = {"runs": len(heard), "alarms": len(first), "at the latest in step": max(first, default=None)}
            print(json.dumps({"way": way, **facts, "ratios": [min(ratios), max(ratios)]}), flush=True)
    process_group.leave()
    os._exit(0)  # gloo's threads can abort a Python that ends among them


if __name__ == "__main__":
    main()
