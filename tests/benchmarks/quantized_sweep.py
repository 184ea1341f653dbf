"""What rounding costs the variants of a sweep: rows of quantize.py joined with the sweep's labels, mean over seeds.

python launcher/sweep.py --config configs/sweeps/quantization.yaml
python launcher/quantize.py --model runs/sweeps/quantization/runs/*/checkpoints/step_* ... --output quantized/blocks
python tests/benchmarks/quantized_sweep.py runs/sweeps/quantization quantized/blocks

Prints a Markdown table: a row for each variant and step, a column for each recipe, nats added ± standard error over
seeds; and the held-out loss before rounding, and the largest kurtosis of a layer's input, by channels.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.runtime import cli
from launcher.runtime.sweep.statistics import mean, standard_error

Row = dict[str, Any]


def main() -> None:
    """Join and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="folder with results.jsonl")
    parser.add_argument("rows", type=Path, help="folder with rows.jsonl")
    arguments = parser.parse_args()
    labels = {
        Path(cell["run"]).name: ", ".join(map(str, cell["labels"].values()))
        for cell in read(arguments.sweep / "results.jsonl")
    }
    groups: dict[tuple[str, int], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in read(arguments.rows / "rows.jsonl"):
        run = next(part for part in Path(row["model"]).parts if part in labels)
        groups[labels[run], row["step"]][row["recipe"]].append(row)
    recipes = list(dict.fromkeys(recipe for found in groups.values() for recipe in found))
    print(f"| variant | step | loss | kurtosis | {' | '.join(recipes)} |")
    print(f"|{'---|' * (len(recipes) + 4)}")
    for (label, step), found in sorted(groups.items()):
        first = next(iter(found.values()))
        outliers = [spread([row["kurtosis_largest"] for row in first], 1)]
        cells = [spread([row["delta"] for row in found[recipe]], 4) if recipe in found else "" for recipe in recipes]
        print(
            f"| {label} | {step} | {' | '.join([spread([row['base_loss'] for row in first], 3), *outliers, *cells])} |"
        )


def read(path: Path) -> list[Row]:
    """Objects of a file of JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard error."""
    error = f" ± {standard_error(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


if __name__ == "__main__":
    cli.run(main)
