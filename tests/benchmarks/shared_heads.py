"""Measure whether attention's change grows with width where one key/value head serves ever more query heads.

    python tests/benchmarks/shared_heads.py [--widths 32 64 128 256] [--seeds 3] [--steps 10] [--text FILE]

It prints a JSON object: QK-norm -> start -> step -> [slope of log2(change of the attention branch) against log2(width),
standard error over seeds]; the change is the RMS since the start on the batch that is trained on. `spectral` starts
uneven matrices as the table does, at a spectral norm that grows as sqrt(fan-out / fan-in); `fan_in` by fan-in alone.
AdamW on one batch of bytes of Python's own source; random tokens give its heads nothing to agree on.
"""

import argparse
import json
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from plumbline.launcher.runtime.sweep.seed_means import mean, standard_error
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.diagnostics.coordinate_check import coordinate_check, slope
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.sizes import sizes
from plumbline.model.parameterization.skeleton import model_tensors
from plumbline.model.parameterization.table import parameter_table

RULE = ParameterizationConfig(
    base_hidden_size=32,
    base_num_hidden_layers=2,
    base_head_dim=16,
    base_num_attention_heads=2,
    base_num_key_value_heads=1,
    base_intermediate_size=96,
)
VOCABULARY, SEQUENCE, BATCH = 256, 64, 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--text", type=Path, default=Path(typing.__file__), help="file of bytes to train on")
    arguments = parser.parse_args()
    text = torch.tensor(list(arguments.text.read_bytes()))
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for qk_norm in ("head", "none"):
        for start in ("spectral", "fan_in"):
            slopes: dict[int, list[float]] = {1: [], arguments.steps: []}
            for seed in range(arguments.seeds):
                sized = [
                    attention_changes(text, width, qk_norm, start, seed, sorted(slopes)) for width in arguments.widths
                ]
                for step, of_seeds in slopes.items():
                    of_seeds.append(slope(arguments.widths, [records[step] for records in sized]))
            found.setdefault(qk_norm, {})[start] = {
                step: [round(mean(of_seeds), 2), round(standard_error(of_seeds) or 0.0, 2)]
                for step, of_seeds in slopes.items()
            }
    print(json.dumps(found, indent=2))


def attention_changes(
    text: Tensor, width: int, qk_norm: str, start: str, seed: int, steps: Sequence[int]
) -> dict[int, float]:
    """Return step -> change of the attention branch in a model of two blocks with one key/value head."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": 2, "qk_norm": qk_norm}
    shape |= {"num_attention_heads": width // 16, "num_key_value_heads": 1, "head_dim": 16}
    model_config = ModelConfig.model_validate(
        {**shape, "intermediate_size": 3 * width, "max_position_embeddings": SEQUENCE}
    )
    rows = parameter_table(model_config, RULE, OptimizerSettings(lr=0.01, weight_decay=0.0, eps=1e-12))
    if start == "fan_in":
        rows = [by_fan_in(row, model_config) for row in rows]
    model = CausalLM(model_config, multipliers(model_config, RULE))
    initialize(model, rows, seed)
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[row.name]], "lr": row.lr, "eps": row.eps} for row in rows]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    begins = torch.randint(len(text) - SEQUENCE, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    tokens = text[begins + torch.arange(SEQUENCE + 1)[None]]
    records = coordinate_check(model, optimizer, tokens[:, :-1], tokens[:, 1:], steps)
    return {step: record["change/attention"] for step, record in records.items()}


def by_fan_in(row: ParameterRow, model: ModelConfig) -> ParameterRow:
    """Return the row of a hidden matrix with the start that its fan-in alone would give."""
    if row.role != "hidden_matrix":
        return row
    fan_in = getattr(sizes(model, RULE), model_tensors(model)[row.name].rule.fans[0])
    return replace(row, init_std=model.initializer_range * fan_in**-0.5)


if __name__ == "__main__":
    main()
