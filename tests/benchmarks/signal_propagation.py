"""Show whether tokens stay apart with depth: mean correlation of the residual stream at the start, by block family.

    python tests/benchmarks/signal_propagation.py [--width 128] [--depths 4 16 64] [--seeds 3]

It prints a JSON object: family -> depth -> [mean correlation of two tokens, standard error over seeds]; 1: rank
collapse. `unshaped` is the Shaped Transformer's wiring without what gives it its name: softmax attention and ReLU.
"""

import argparse
import json

import torch

from plumbline.launcher.runtime.sweep.seed_means import mean, standard_error
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.diagnostics.observer import observing
from plumbline.model.families import FAMILIES
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.table import parameter_table

UNSHAPED = {**FAMILIES["shaped"], "attention": "softmax", "shaped_temperature": None, "mlp": "relu"}
KINDS = {
    "qwen3": {"family": "qwen3"},
    "outlier_protected": {"family": "outlier_protected"},
    "fog": {"family": "fog"},
    "shaped": {"family": "shaped"},
    "unshaped": UNSHAPED,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    results: dict[str, dict[int, list[float]]] = {}
    for kind, switches in KINDS.items():
        results[kind] = {}
        for depth in arguments.depths:
            found = [correlation(switches, arguments.width, depth, seed) for seed in range(arguments.seeds)]
            results[kind][depth] = [round(mean(found), 4), round(standard_error(found) or 0.0, 4)]
    print(json.dumps(results, indent=2))


def correlation(switches: dict[str, object], width: int, depth: int, seed: int) -> float:
    """Return that of the stream that reaches the head, for random tokens."""
    shape = {"vocab_size": 512, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // 32}
    shape |= {"intermediate_size": width}  # one fan-in for all matrices
    config = ModelConfig.model_validate(
        # Weights of variance 1 / fan-in, tokens of unit size: what the theory is about
        {**shape, **switches, "max_position_embeddings": 64, "initializer_range": width**-0.5}
    )
    rule = ParameterizationConfig(rule="sp", embedding_multiplier=width**0.5)
    model = CausalLM(config, multipliers(config, rule)).eval()
    initialize(model, parameter_table(config, rule, OptimizerSettings(lr=1.0, weight_decay=0.0, eps=1e-8)), seed)
    tokens = torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(seed))
    with observing(model, attention_stride=1) as observation:
        model(tokens)
    return observation.record()["stream/corr_mean/head"]


if __name__ == "__main__":
    main()
