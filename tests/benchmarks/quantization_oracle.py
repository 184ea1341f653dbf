"""Compare our rounding of weights with torchao's on the same weights of a stock model, by the loss that each adds.

python launcher/export.py --model runs/quickstart --output exports/quickstart
python tests/benchmarks/quantization_oracle.py --model exports/quickstart --data corpora/stdlib

torchao's symmetric grids reach from -absmax to absmax (2^b - 2) / (2^b - 1), ours from -absmax to absmax with one code
unused, so the two are alike and not equal; its asymmetric grids are ours. It prints one JSON document.
"""

import argparse
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plumbline.data.config import SourceConfig
from plumbline.data.loader import ValidationBatches
from plumbline.data.opening import open_source
from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.models.held_out import check_tokenizer, window_length
from plumbline.launcher.runtime.models.open import LoadedModel, load_model
from plumbline.launcher.runtime.quantize.damage import Damage, compare, damage
from plumbline.model.quantization.post_training.apply import quantize_model
from plumbline.model.quantization.post_training.calibration import decoder_blocks
from plumbline.model.quantization.post_training.recipes import Recipe
from plumbline.model.quantization.quantizer import Quantizer

GROUP = 32


def main() -> None:
    """Score both on the held-out text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--data", required=True, help="corpus")
    parser.add_argument("--max-batches", type=cli.positive, default=64, help="of 8 sequences")
    arguments = parser.parse_args()
    source = open_source(SourceConfig(path=arguments.data))
    model = load_model(arguments.model, torch.device("cpu"))
    check_tokenizer(model, source)
    batches = ValidationBatches(source.held_out, window_length(model, None), 8, arguments.max_batches)

    def added(quantized: LoadedModel) -> Damage:
        return damage(compare(model, quantized, batches), source.held_out)

    rows = []
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            ours, theirs = (added(quantize(model, bits, symmetric)) for quantize in (by_us, by_torchao))
            both = {"ours": ours.delta, "torchao": theirs.delta, "interval": ours.delta_interval}
            rows.append({"bits": bits, "group_size": GROUP, "symmetric": symmetric, **both})
    print(json.dumps({"model": str(model.source), "base_loss": added(model).base_loss, "rows": rows}, indent=2))


def by_us(model: LoadedModel, bits: int, symmetric: bool) -> LoadedModel:
    """Return the values rounded to the nearest of the grid, by us."""
    weights = Quantizer(format=f"int{bits}", granularity="group", group_size=GROUP, symmetric=symmetric)
    quantized = replace(model, module=deepcopy(model.module))
    quantize_model(quantized.module, Recipe(name="oracle", weights=weights))
    return quantized


def by_torchao(model: LoadedModel, bits: int, symmetric: bool) -> LoadedModel:
    """Return the same, by torchao."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
    from torchao.quantization.quant_primitives import MappingType

    mapping = MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC
    quantized = replace(model, module=deepcopy(model.module))
    config: Any = IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), PerGroup(GROUP), mapping)
    quantize_(decoder_blocks(quantized.module)[1], config)
    return quantized


if __name__ == "__main__":
    cli.run(main)
