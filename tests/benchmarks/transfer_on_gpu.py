"""Run the transfer experiment of docs/transfer.md on one GPU: tune the base, then train what is 13 times its size.

    python tests/benchmarks/transfer_on_gpu.py [--dry-run] [--workers 4]

The first part is configs/sweeps/transfer_gpu_base.yaml. The second trains 1024 x 4, 512 x 16 and 256 x 64 (about 54M
parameters each without embedding and head) under CompleteP at half, one and two times the base's best rate, and 256 x
64 under muP at seven rates, three seeds each. Its sweep file is written beside the results of the first, because it
holds what that found. Both resume: the same command again trains what is missing. It prints both summaries.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "configs" / "sweeps" / "transfer_gpu_base.yaml"
RESULTS = Path("runs/sweeps/transfer_gpu_base")
CORPUS = Path("corpora/stdlib")
SIZES = {"1024 x 4": (1024, 4), "512 x 16": (512, 16), "256 x 64": (256, 64)}
MUP_OCTAVES = range(-4, 3)


def main() -> None:
    """Run both parts, or check what can be checked of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="runs at once on the GPU (default: 4)")
    parser.add_argument("--dry-run", action="store_true", help="check both sweeps, train nothing")
    arguments = parser.parse_args()
    if not CORPUS.exists():
        launch("prepare.py", "--source", "stdlib", "--tokenizer", "train-bpe:4096", "--output", str(CORPUS))
    how = ["--dry-run"] if arguments.dry_run else ["--workers", str(arguments.workers)]
    launch("sweep.py", "--config", str(BASE), *how)
    init, lr = ({}, 2.0**-7) if arguments.dry_run else best_of_base(json.loads((RESULTS / "summary.json").read_text()))
    RESULTS.mkdir(parents=True, exist_ok=True)
    targets = RESULTS / "targets.yaml"
    targets.write_text(json.dumps(second_part(init, lr), indent=1) + "\n", encoding="utf-8")  # JSON is YAML
    launch("sweep.py", "--config", str(targets), *how)


def launch(script: str, *arguments: str) -> None:
    """Run a command of the launcher, and end with its exit code if it fails."""
    code = subprocess.run([sys.executable, str(ROOT / "launcher" / script), *arguments], check=False).returncode
    if code:
        raise SystemExit(code)


def best_of_base(summary: dict[str, Any]) -> tuple[dict[str, float], float]:
    """Return the first weights and the learning rate with the lowest mean loss."""
    variants = summary["comparison"]["all"]
    name, variant = next(iter(variants.items()))
    if variant["best"] is None:
        raise SystemExit(f"{RESULTS}: the base is not finished")
    return {"model.initializer_range": float(name.split()[-1])}, float(variant["best"].split("=")[-1])


def second_part(init: dict[str, float], lr: float) -> dict[str, Any]:
    """Return the sweep of the targets, around the base's best rate."""

    def size(width: int, depth: int) -> dict[str, int]:
        heads = width // 64
        model = {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": 3 * width}
        model |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        return {f"model.{key}": value for key, value in model.items()}

    completep = {"completep": {"parameterization.rule": "completep"}}
    mup = {"mup": {"parameterization.rule": "mup"}}
    return {
        "name": "transfer_gpu_targets",
        "kind": "comparison",
        "base": str(ROOT / "configs" / "transfer_gpu.yaml"),
        "comparison": {"variants": "rule", "within": "size"},
        "set": init,
        "seeds": [1, 2, 3],
        "grids": [
            {
                "axes": {
                    "rule": completep,
                    "size": {name: size(*shape) for name, shape in SIZES.items()},
                    "optimizer.lr": [lr / 2, lr, 2 * lr],
                }
            },
            {
                "axes": {
                    "rule": mup,
                    "size": {"256 x 64": size(256, 64)},
                    "optimizer.lr": [lr * 2.0**octave for octave in MUP_OCTAVES],
                }
            },
        ],
    }


if __name__ == "__main__":
    main()
