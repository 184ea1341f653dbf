"""Time how long training waits for a checkpoint that is written behind it, against one that it waits for.

    python tests/benchmarks/checkpoint_stall.py [--layers 12] [--saves 5]

One rank, ZeRO stage 1, AdamW in fp32: 12 bytes of state for each parameter. Saves of both kinds in turn, each when the
one before is written. Prints the medians in seconds, and their ratio.
"""

import argparse
import contextlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from plumbline.launcher.runtime.checkpoint.background import CheckpointWriter
from plumbline.launcher.runtime.checkpoint.snapshot import take_snapshot
from plumbline.launcher.runtime.checkpoint.store import TrainState
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.system import startup
from plumbline.launcher.runtime.system.world import read_world

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def main() -> None:
    """Save in the foreground and in the background in turn, and print how long each held training up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--saves", type=int, default=5)
    arguments = parser.parse_args()
    world = replace(read_world(), device=torch.device("cpu"))
    startup.start(world, 5.0)
    overrides = [
        "model.vocab_size=4096",
        "model.hidden_size=512",
        "model.intermediate_size=1536",
        f"model.num_hidden_layers={arguments.layers}",
        "deepspeed.precision=fp32",
        "data.micro_batch_size=1",
        "data.sequence_length=64",
        "data.global_batch_size=1",
        "checkpoint.keep_last=1",
    ]
    config = load_config(CONFIG, overrides)
    engine = DeepSpeedEngine(config, world)
    tokens = torch.randint(4096, (1, 64))
    batch = {"input_ids": tokens, "labels": tokens, "document_ids": torch.zeros_like(tokens, dtype=torch.int32)}
    batch["positions"] = torch.arange(64, dtype=torch.int32)[None]
    engine.train_step([batch], 0, 1e-3)
    waited: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(config, Path(folder), world)
        for number in range(2 * arguments.saves):
            foreground = number % 2 == 0
            state = TrainState(step=number + 1, samples=number, tokens=number, corpora={})
            begun = time.monotonic()
            with contextlib.redirect_stdout(None):
                writer.save(lambda state=state: take_snapshot(engine, config, state, world), wait=foreground)  # type: ignore[misc]
            waited[foreground].append(time.monotonic() - begun)
            writer.finish()
        writer.close()
    parameters = sum(parameter.numel() for parameter in engine.model.parameters())
    whole, behind = median(waited[True]), median(waited[False])
    print(f"{parameters / 1e6:.0f}M parameters, {12 * parameters / 2**20:.0f} MiB, median of {arguments.saves}")
    print(f"foreground {whole:.3f} s, background {behind:.3f} s: training waits {behind / whole:.1%} of the time")
    startup.stop()


if __name__ == "__main__":
    main()
