"""Measure what Dynamic Context Pruning keeps, costs and saves, by a run that prunes and a dense one, on held-out text.

    python tests/benchmarks/context_pruning.py --dense runs/dense --pruned runs/pruned --data corpora/stdlib

It prints a JSON object: held-out loss of both; share of the earlier tokens that each layer keeps; and for greedy
decoding of held-out text, token by token: bytes of the KV caches at the end and the ratio of tokens per second, timed
in turns.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from plumbline.data.corpus import open_corpus
from plumbline.data.loader import ValidationBatches
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.scoring.scores import held_out_loss
from plumbline.model.attention.context import LayerCache
from plumbline.model.attention.pruned import PrunedAttention, PrunedCache
from plumbline.model.decoder import CausalLM

ROUNDS = 3  # of timing


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", type=Path, required=True)
    parser.add_argument("--pruned", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4, help="sequences decoded at once")
    arguments = parser.parse_args()
    models = {name: load_model(getattr(arguments, name), torch.device("cpu")) for name in ("dense", "pruned")}
    split = open_corpus(arguments.data).held_out
    length = models["pruned"].context_length
    assert length is not None, "a run has a limit"
    batches = ValidationBatches(split, length, arguments.rows, max_batches=16)
    facts: dict[str, object] = {"sequence_length": length}
    for name, model in models.items():
        scores = held_out_loss(model, batches, split)
        facts[f"{name}_loss"] = round(scores.loss, 4)
    decoders = {name: model.module for name, model in models.items()}
    tokens = next(iter(batches))["input_ids"]
    facts["kept"] = kept(decoders["pruned"], tokens)
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(ROUNDS):
        for name, decoder in decoders.items():
            assert isinstance(decoder, CausalLM), "runs of ours"
            begun = time.perf_counter()
            facts[f"{name}_cache_bytes"] = decode(decoder, tokens)
            seconds[name].append(time.perf_counter() - begun)
    facts["tokens_per_second_ratio"] = round(min(seconds["dense"]) / min(seconds["pruned"]), 3)
    print(json.dumps(facts, indent=2))


@torch.no_grad()
def kept(model: torch.nn.Module, tokens: Tensor) -> list[float]:
    """Share of the earlier tokens that each layer keeps, averaged over queries."""
    model(tokens)
    layers = [module for module in model.modules() if isinstance(module, PrunedAttention)]
    return [round(float(layer.kept), 4) for layer in layers if layer.kept is not None]


@torch.no_grad()
def decode(model: CausalLM, tokens: Tensor) -> int:
    """Feed the tokens one at a time; returns the bytes of the caches after the last one."""
    cache = model.new_cache(len(tokens), tokens.size(1))
    for position in range(tokens.size(1)):
        model(tokens[:, position : position + 1], cache=cache)
    return sum(map(_bytes, cache))


def _bytes(cache: LayerCache | PrunedCache) -> int:
    """Return the bytes of keys and values, and of what decides on them."""
    held = cache.keys.nbytes + cache.values.nbytes
    return held + cache.offers.nbytes + cache.alive.nbytes if isinstance(cache, PrunedCache) else held


if __name__ == "__main__":
    main()
