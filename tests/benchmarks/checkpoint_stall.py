"""Time how long training waits for a checkpoint that is written behind it, against one that it waits for.

    python tests/benchmarks/checkpoint_stall.py [--layers 12] [--saves 5] [--local /dev/shm]

One rank, ZeRO stage 1, AdamW in fp32: 12 bytes of state for each parameter. Saves of both kinds in turn, to a run
folder among temporary files and to a local one, each when the one before is written. Prints the medians in seconds, and
their ratio; a save that fails ends it.
"""

import argparse
import contextlib
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median

import torch

from plumbline.launcher.runtime.checkpoint.background import CheckpointWriter
from plumbline.launcher.runtime.checkpoint.local import LocalCheckpoints
from plumbline.launcher.runtime.checkpoint.snapshot import take_snapshot
from plumbline.launcher.runtime.checkpoint.store import TrainState
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import read_world

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
MEMORY, ROOM = Path("/dev/shm"), 4 * 2**30


def main() -> None:
    """Save in the foreground and in the background in turn, and print how long each held training up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument(
        "--local",
        type=Path,
        default=MEMORY if shutil.disk_usage(MEMORY).free > ROOM else Path(tempfile.gettempdir()),
        help="folder of checkpoint.local; by default in memory, where a container gives it room",
    )
    arguments = parser.parse_args()
    world = read_world()
    process_group.join(world, 5.0)
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
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=arguments.local) as local:
        overrides += [f"run.root={folder}", f"checkpoint.local.path={local}", "checkpoint.local.interval=1"]
        config = load_config(CONFIG, overrides)
        engine = DeepSpeedEngine(config, world)
        train_a_step(engine)
        waited = time_saves(engine, config, Path(folder) / "checkpoints", arguments.saves)
    parameters = sum(parameter.numel() for parameter in engine.model.parameters())
    print(f"{parameters / 1e6:.0f}M parameters, {12 * parameters / 2**20:.0f} MiB, median of {arguments.saves}")
    for locally, place in ((False, "run folder"), (True, str(arguments.local))):
        whole, behind = median(waited[locally, True]), median(waited[locally, False])
        print(f"{place}: foreground {whole:.3f} s, background {behind:.3f} s: {behind / whole:.1%}")
    process_group.leave()


def train_a_step(engine: DeepSpeedEngine) -> None:
    """Let the optimizer have a state."""
    tokens = torch.randint(4096, (1, 64))
    batch = {"input_ids": tokens, "labels": tokens, "document_ids": torch.zeros_like(tokens, dtype=torch.int32)}
    batch["positions"] = torch.arange(64, dtype=torch.int32)[None]
    engine.train_step([batch], 0, 1e-3)


def time_saves(
    engine: DeepSpeedEngine, config: Config, root: Path, saves: int
) -> Mapping[tuple[bool, bool], Sequence[float]]:
    """Return (locally, in the foreground) -> seconds that each save held training up."""
    waited: dict[tuple[bool, bool], list[float]] = defaultdict(list)
    local = LocalCheckpoints(config, engine.world)
    writer = CheckpointWriter(config, root, engine.world, local, heartbeat=lambda _doing: None)
    kinds = product((False, True), (True, False))
    for number, (locally, foreground) in enumerate(islice(cycle(kinds), 4 * saves)):
        state = TrainState(step=number + 1, samples=number, tokens=number, corpora={})
        take = partial(take_snapshot, engine, state, locally)
        begun = time.monotonic()
        with contextlib.redirect_stdout(None):
            ended = writer.save(take, wait=foreground, locally=locally)
        waited[locally, foreground].append(time.monotonic() - begun)
        ended = ended or writer.finish()
        if ended is not None and ended.error is not None:
            raise SystemExit(f"error: {ended.error}")
    writer.close()
    return waited


if __name__ == "__main__":
    main()
