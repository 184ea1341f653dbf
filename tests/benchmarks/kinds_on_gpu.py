"""Train each kind of model on a GPU, compiled and not, and compare: every kind runs there, and is one model.

    python tests/benchmarks/kinds_on_gpu.py [--only PATTERN] [--part 1/4] [--steps 5] [section.key=value ...]

The reference takes the same steps with blocks uncompiled, masks written out, and bf16 in the place of float8; a kind
whose blocks are never compiled differs in nothing. `loss` and `grad_norm` are the largest relative differences over the
steps: rounding in another order, which grows as training goes on. --part K/N takes every N-th kind, for several
processes on one GPU. Exit code 1: a kind failed, a number is not finite, losses differ by more than --most, or norms by
more than five times that. It prints one JSON object.
"""

import argparse
import gc
import json
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world
from tests.benchmarks.step_cost import write_random_text

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
DOCUMENTS = "model.document_mask=true"
KINDS: dict[str, list[str]] = {
    **{
        name: [f"model.family={name}"]
        for name in ("qwen3", "llama", "gpt2", "olmo2", "outlier_protected", "fog", "shaped", "mixit")
    },
    "sas": ["model.family=sas", "model.num_key_value_heads=4"],
    "documents": [DOCUMENTS],
    "window": ["model.sliding_window=100"],
    "documents, window, other length": [DOCUMENTS, "model.sliding_window=100", "data.sequence_length=200"],
    "documents, gpt2": ["model.family=gpt2", DOCUMENTS],
    "context pruning": ["model.attention=pruned", "model.pruning_rank=16"],
    "value residual, documents": ["model.value_residual=true", DOCUMENTS],
    "cap, documents": ["model.attn_logit_softcapping=20.0", DOCUMENTS],
    "sink, documents": ["model.attention_sink=true", DOCUMENTS],
    "dropout": ["model.dropout=0.1"],
    "recomputed, documents": [DOCUMENTS, "train.activation_checkpointing=full"],
    "selective": ["train.activation_checkpointing=selective"],
    "lookahead": ["objective.name=latent_lookahead", "objective.horizon=3"],
    "lookahead, documents": ["objective.name=latent_lookahead", "objective.horizon=3", DOCUMENTS],
    "lookahead, masks in blocks": [
        "objective.name=latent_lookahead",
        "objective.horizon=3",
        "objective.masks=blocks",
        DOCUMENTS,
    ],
    "multi-token": ["objective.name=multi_token", "objective.horizon=2"],
    "sequential multi-token": ["objective.name=sequential_mtp", "objective.horizon=2"],
    "registers": ["objective.name=registers"],
    "z-loss": ["objective.z_loss=1.0e-4"],
    "int4 weights": ["precision.weights={format: int4, granularity: group, group_size: 32}"],
    "float8 tensorwise": ["precision.float8=tensorwise"],
    "float8 rowwise": ["precision.float8=rowwise"],
    "muon": ["optimizer.name=muon"],
    "soap, stage 0": ["optimizer.name=soap", "deepspeed.zero_stage=0"],
    "stage 2": ["deepspeed.zero_stage=2"],
    "stage 3": ["deepspeed.zero_stage=3"],
    "stage 3, gpt2": ["deepspeed.zero_stage=3", "model.family=gpt2"],  # biases
    "stage 3, documents": ["deepspeed.zero_stage=3", DOCUMENTS],
    "offloaded, stage 2": ["deepspeed.zero_stage=2", "deepspeed.offload_optimizer=true"],
    "fp32": ["deepspeed.precision=fp32"],
}


def train(corpus: Path, overrides: list[str], steps: int, world: World) -> tuple[list[tuple[float, float]], float]:
    """Return loss and gradient norm of each step, and the seconds of the first one."""
    config = load_config(CONFIG, [f"data.train=[{{path: {corpus}}}]", "model.vocab_size=4096", *overrides])
    engine = DeepSpeedEngine(config, world)
    batches = TrainBatches(config.data, 1, world.rank, world.size, gpu=world.device.index)
    found, first = [], 0.0
    for number in range(steps):
        start = time.perf_counter()
        result = engine.train_step(batches.micro_batches(number), number, 1e-3).result
        first = first or time.perf_counter() - start
        found.append((float(result.loss), result.grad_norm))
    return found, first


def compare(corpus: Path, overrides: list[str], steps: int, world: World) -> dict[str, Any]:
    """Return how far a kind, compiled, is from itself."""
    compiled, first = train(corpus, overrides, steps, world)
    plain = [each for each in overrides if not each.startswith("precision.float8")]
    reference, _ = train(corpus, [*plain, "train.compile=false", "train.block_masks=false"], steps, world)
    differences = (torch.tensor(compiled, dtype=torch.float64) / torch.tensor(reference, dtype=torch.float64) - 1).abs()
    losses, norms = differences.amax(0).tolist()  # which nan is if one is
    return {"loss": losses, "grad_norm": norms, "first_step_seconds": round(first, 1)}


def is_one_model(row: dict[str, Any], most: float) -> bool:
    """Return whether a kind ran, and came to the same numbers compiled and not."""
    return "error" not in row and row["loss"] <= most and row["grad_norm"] <= 5 * most


def main() -> int:
    """Compare each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression over kinds")
    parser.add_argument("--part", default="1/1", metavar="K/N")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--most", type=float, default=0.01, help="relative difference of losses (default: 0.01)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    world = read_world()
    process_group.join(world, timeout_minutes=10)
    part, parts = map(int, arguments.part.split("/"))
    kinds = [name for name in KINDS if re.search(arguments.only, name)][part - 1 :: parts]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "random"
        write_random_text(corpus, 4096, tokens=2_000_000, documents=2000)
        for name in kinds:
            torch.manual_seed(0)
            try:
                row = compare(corpus, [*KINDS[name], *arguments.overrides], arguments.steps, world)
            except Exception as error:  # whatever it is, the other kinds are to be tried
                traceback.print_exc()
                row = {"error": f"{type(error).__name__}: {error}"[:500]}
            results.append({"kind": name, **row})
            print(results[-1], file=sys.stderr, flush=True)
            gc.collect()
            torch._dynamo.reset()
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    print(json.dumps({"device": device, "overrides": arguments.overrides, "results": results}, indent=2))
    process_group.leave()
    return 0 if all(is_one_model(row, arguments.most) for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
