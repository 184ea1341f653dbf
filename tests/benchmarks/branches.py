"""Measure a scaling curve by one run: branches that cool down from a stable run, against a run of each length.

    python tests/benchmarks/branches.py [--folder DIR] [--lengths 100 200 400]

It trains one run at a constant rate to 80 % of the longest length, a branch for each length that cools down over its
last 20 %, and for comparison a run with that same schedule from the start. Then it makes the last cooldown again in
every shape, and with a higher beta2. It prints one JSON object: held-out loss at each end, and the steps trained.
The corpus is the standard library as bytes, the model has 0.1M parameters, everything runs in one process on one core.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from plumbline.launcher.runtime.commands import cli

LAUNCHER = Path(__file__).resolve().parents[2] / "launcher"
CONFIG = """\
run: {{name: stable, root: {folder}/runs}}
model:
  {{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 192}}
parameterization: {{rule: sp}}
data: {{train: [{{path: {folder}/corpus}}], sequence_length: 128, global_batch_size: 8, micro_batch_size: 8}}
optimizer: {{lr: 8.0e-3}}
schedule: {{name: constant, warmup: 20 steps}}
train: {{steps: {steps}, eval_batches: 64}}
deepspeed: {{zero_stage: 0, precision: fp32}}
checkpoint: {{keep_last: 99, interval: {interval}}}
metrics: {{trackers: [], peak_tflops: 0.1}}
"""
SHAPE = ["schedule.cooldown=one_minus_sqrt"]
OTHERS = {
    "linear": ["schedule.cooldown=linear"],
    "cosine": ["schedule.cooldown=cosine"],
    "square": ["schedule.cooldown=square"],
    "exponential to 0.01": ["schedule.cooldown=exponential", "schedule.final_lr_fraction=0.01"],
    "one_minus_sqrt, beta2 0.99": [*SHAPE, "optimizer.betas=[0.9, 0.99]"],
}


def run(verb: str, *words: str | Path) -> None:
    """Run a verb of the launcher, on one core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(LAUNCHER / f"{verb}.py"), *map(str, words)]
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)


def train(config: Path, name: str, *overrides: str) -> float:
    """Train under a name; returns the final held-out loss, nats per byte."""
    run("pretrain", "--config", config, f"run.name={name}", *overrides)
    result = json.loads((config.parent / "runs" / name / "result.json").read_text())
    return float(result["eval/corpus/loss"])


def main() -> None:
    """Train everything and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where corpus and runs go, and stay (default: a temporary folder)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 200, 400], help="multiples of the shortest")
    arguments = parser.parse_args()
    if any(length % min(arguments.lengths) for length in arguments.lengths) or min(arguments.lengths) % 5:
        parser.error("--lengths: multiples of the shortest, which is a multiple of 5")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        cli.print_json(measure(folder, sorted(arguments.lengths)))


def measure(folder: Path, lengths: list[int]) -> dict[str, object]:
    """Train every run; folder keeps them."""
    folder.mkdir(parents=True, exist_ok=True)
    stable = lengths[-1] * 4 // 5
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=folder, steps=stable, interval=lengths[0] * 4 // 5))
    if not (folder / "corpus").exists():
        run("prepare", "--source", "stdlib", "--tokenizer", "byte", "--output", folder / "corpus")
    stable_loss = train(config, "stable")

    def branch(length: int, name: str, *overrides: str) -> float:
        point = folder / "runs" / "stable" / "checkpoints" / f"step_{length * 4 // 5:08d}"
        place = [f"schedule.branch.checkpoint={point}", f"schedule.branch.steps={length // 5}"]
        return train(config, name, *place, *overrides)

    curve = []
    for length in lengths:
        schedule = ["schedule.name=wsd", "schedule.decay=20%", f"train.steps={length}", *SHAPE]
        direct = train(config, f"direct-{length}", *schedule)
        curve.append({"steps": length, "branch": branch(length, f"branch-{length}", *SHAPE), "direct": direct})
    return {
        "stable": {"steps": stable, "loss": stable_loss},
        "lengths": curve,
        "steps_trained": {"stable_and_branches": stable + sum(lengths) // 5, "direct": sum(lengths)},
        "shapes": {"one_minus_sqrt": curve[-1]["branch"]}
        | {
            name: branch(lengths[-1], f"shape-{number}", *overrides)
            for number, (name, overrides) in enumerate(OTHERS.items())
        },
    }


if __name__ == "__main__":
    main()
