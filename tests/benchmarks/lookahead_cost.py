"""Measure what thoughts cost: forward and backward with them against without, and against the tokens they take.

    python tests/benchmarks/lookahead_cost.py [--width 384 --depth 6 --length 1024 --batch 2 --anchors 32 --horizon 4]
        [--compile]

The ways to think alternate with the plain model in one process; medians are compared. `tokens` is how many tokens and
slots pass the blocks for each token of text, `seconds` the ratio of times, `overhead` the second over the first: what
passes of few tokens, masks and copies of keys cost beyond arithmetic. --compile compiles blocks and losses, as training
does on a GPU, where uncompiled ones wait for the host. Weights and text are random. It prints one JSON object.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.launcher.runtime.engine.build import compile_model
from plumbline.launcher.runtime.models.open import device_named
from plumbline.model.config import ModelConfig
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.objectives.latent_lookahead import LatentLookaheadConfig
from plumbline.model.objectives.next_token import NextTokenConfig
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.table import parameter_table
from tests.benchmarks.turns import take_turns


def main() -> None:
    """Measure all ways to think at one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "width": 384,
        "depth": 6,
        "vocabulary": 8192,
        "length": 1024,
        "batch": 2,
        "anchors": 32,
        "horizon": 4,
        "rounds": 7,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true", help="compile blocks and losses")
    arguments = parser.parse_args()
    thinking: dict[str, Any] = {"anchors": arguments.anchors, "horizon": arguments.horizon}
    ways: dict[str, LatentLookaheadConfig] = {
        "grow": LatentLookaheadConfig(**thinking),
        "grow, causal": LatentLookaheadConfig(**thinking, within="causal"),
        "one pass": LatentLookaheadConfig(**thinking, growth="fixed", passes=1),
        "three passes": LatentLookaheadConfig(**thinking, growth="fixed", passes=3),
    }
    seconds = measure(arguments, {"plain": NextTokenConfig(), **ways})
    ratios = {name: seconds[name] / seconds["plain"] for name in ways}
    tokens = {name: way.work(arguments.length).blocks for name, way in ways.items()}
    rows = {
        name: {
            "tokens": round(tokens[name], 3),
            "seconds": round(ratios[name], 3),
            "overhead": round(ratios[name] / tokens[name], 3),
        }
        for name in ways
    }
    facts = {**vars(arguments), "device": device_named(None).type, "threads": torch.get_num_threads()}
    print(json.dumps({**facts, "plain_seconds": round(seconds["plain"], 4), "ways": rows}))


def measure(arguments: argparse.Namespace, objectives: dict[str, ObjectiveConfig]) -> dict[str, float]:
    """Median seconds of a forward and a backward of each."""
    device = device_named(None)
    shape = ModelConfig(  # type: ignore[call-arg]  # the rest is filled in
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        num_hidden_layers=arguments.depth,
        num_attention_heads=max(1, arguments.width // 64),
        max_position_embeddings=arguments.length,
    )
    models = {name: make(shape, objective).to(device) for name, objective in objectives.items()}
    if arguments.compile:
        for model in models.values():
            compile_model(model, exact_division=False)
            model.model.block_masks = device.type == "cuda"
    tokens = torch.randint(arguments.vocabulary, (arguments.batch, arguments.length + 1), device=device)
    places = torch.arange(arguments.length, device=device).expand(arguments.batch, -1)
    batch = {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:].contiguous(),
        "document_ids": torch.zeros_like(places),
        "positions": places,
        "sample_index": torch.arange(arguments.batch, device=device),
    }

    def think(model: TrainedLM) -> None:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = model.losses(batch, 0)
        losses.terms.sum().backward()

    return take_turns({name: partial(think, model) for name, model in models.items()}, arguments.rounds, device)


def make(shape: ModelConfig, objective: ObjectiveConfig) -> TrainedLM:
    """Return a model with its objective, at its first weights."""
    rule = ParameterizationConfig(rule="sp")
    forward = multipliers(shape, rule)
    model = TrainedLM(shape, forward, objective.make(shape, forward, 0))
    initialize(model, parameter_table(shape, rule, OptimizerSettings(1e-3, 0.1, 1e-8, (0.9, 0.95)), objective), seed=1)
    return model


if __name__ == "__main__":
    main()
