"""Share what measurements of a step's cost begin with and print: options, random text, facts of the machine."""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.world import World

VOCABULARY, TOKENS = 4096, 2_000_000


def parse_arguments(description: str | None, rounds: int) -> argparse.Namespace:
    """Read the command line: a configuration, what is changed of it, how many steps of each kind are made."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--rounds", type=int, default=rounds, help="steps of each kind")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args()


def write_random_text(corpus: Path, vocabulary: int, tokens: int, documents: int = 1) -> None:
    """Write random tokens as a corpus, `corpus.bin` and `corpus.idx`, in documents of equal length; on every rank."""
    with IndexedWriter(corpus, token_dtype(vocabulary)) as writer:
        drawn = np.random.default_rng(0).integers(0, vocabulary, tokens // documents * documents, dtype=np.uint16)
        writer.add_documents(drawn, [tokens // documents] * documents)


def on_random_text(arguments: argparse.Namespace, folder: Path) -> Config:
    """Return the configuration that was asked for, training on random text that is written into a folder."""
    corpus = folder / "random"
    write_random_text(corpus, VOCABULARY, TOKENS)
    fixed = [f"data.train=[{{path: {corpus}}}]", f"model.vocab_size={VOCABULARY}"]
    return load_config(arguments.config, [*fixed, *arguments.overrides])


def setting_of(arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """Return what a measurement depends on."""
    return {
        "config": str(arguments.config),
        "overrides": arguments.overrides,
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
    }
