"""Show what rounding costs the variants of a sweep: rows of quantize.py by the sweep's labels, mean over seeds.

python launcher/sweep.py --config configs/sweeps/quantization.yaml
python launcher/quantize.py --model runs/sweeps/quantization/runs/*/checkpoints/step_* ... --output quantized/blocks
python tests/benchmarks/quantized_sweep.py runs/sweeps/quantization quantized/blocks
python tests/benchmarks/quantized_sweep.py runs/sweeps/quantization quantized/blocks --pairs "decay" "no decay"

It prints a Markdown table: a row for each variant and step, a column for each recipe, nats added ± standard error over
seeds; and the held-out loss before rounding, and the largest kurtosis of a layer's input, by channels.

With --pairs, instead: for each recipe the geometric mean, over pairs of cells that differ in these two labels alone, of
the ratio of what rounding their last checkpoints adds; and over the second label's cells the exponent e of D^e, from
their first checkpoint to their last. Both with 95 % intervals by Student's t over seeds, each of which counts once, by
the mean of its cells: with and without a decay, runs of one seed are the same until it begins. What rounding does not
worsen is left out.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.sweep.seed_means import mean, standard_error, student

Row = dict[str, Any]
MEASURED_BY = ("average", "data", "data_fingerprint", "sequence_length", "max_batches", "calibration_sequences")
"""Keys of a row that say how a checkpoint was measured."""


def main() -> None:
    """Join and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="results.jsonl, or its folder")
    parser.add_argument("rows", type=Path, help="rows.jsonl, or its folder")
    parser.add_argument(
        "--pairs", nargs=2, metavar="LABEL", help="compare cells with the first to those with the second"
    )
    arguments = parser.parse_args()
    rows = joined(read(arguments.sweep, "results.jsonl"), read(arguments.rows, "rows.jsonl"))
    if arguments.pairs:
        labels = dict.fromkeys(label for row in rows for _, label in row["labels"])
        if unknown := [label for label in arguments.pairs if label not in labels]:
            raise ValueError(f"--pairs {unknown[0]}: no row has this label; there are {', '.join(labels)}")
        print_pairs(rows, *arguments.pairs)
    else:
        print_table(rows)


def joined(cells: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Return each row once for each cell that shares its run, with the cell's `seed` and `labels`, (axis, text).

    Raises:
        ValueError: a row is of no run of the sweep, or two are measurements of one checkpoint with one recipe.
    """
    of_runs: dict[str, list[Row]] = defaultdict(list)
    for cell in cells:
        labels = tuple((axis, str(label)) for axis, label in cell["labels"].items())
        of_runs[Path(cell["run"]).name].append({"labels": labels, "seed": cell["seed"]})
    found: dict[tuple[str, int, str], Row] = {}
    for row in rows:
        key = run_of(row, of_runs), row["step"], row["recipe"]
        before = found.setdefault(key, row)
        if before is not row:
            other = [name for name in MEASURED_BY if before.get(name) != row.get(name)]
            raise ValueError(
                f"{row['model']}: measured twice with {row['recipe']}, with another {', '.join(other) or 'recipe'}; "
                "give rows of one measurement"
            )
    return [{**row, **cell} for (run, _, _), row in found.items() for cell in of_runs[run]]


def run_of(row: Row, cells: Container[str]) -> str:
    """Return which of the sweep's runs a row is of.

    Raises:
        ValueError: none of them.
    """
    run = next((part for part in Path(row["model"]).parts if part in cells), None)
    if run is None:
        raise ValueError(
            f"{row['model']}: not in the sweep's results.jsonl; rows and runs of an earlier grid have to go elsewhere"
        )
    return run


def print_table(rows: Sequence[Row]) -> None:
    """Print a row for each variant and step."""
    groups: dict[tuple[str, int], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        label = ", ".join(f"{axis}={text}" if "." in axis else text for axis, text in row["labels"])
        groups[label, row["step"]][row["recipe"]].append(row)
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


def print_pairs(rows: Sequence[Row], first: str, second: str) -> None:
    """Print a line for each recipe."""
    added: dict[str, dict[tuple[Any, ...], dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = *(label for _, label in row["labels"]), row["seed"]
        added[row["recipe"]][key][row["step"]] = row["delta"]
    for recipe, found in added.items():
        ratios, exponents = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
        for key, steps in found.items():
            begin, end, seed = min(steps), max(steps), key[-1]
            if second not in key or steps[end] <= 0:
                continue
            if end > begin and steps[begin] > 0:
                exponents[seed].append(math.log(steps[end] / steps[begin]) / math.log(end / begin))
            other = found.get(tuple(first if part == second else part for part in key), {}).get(end, 0.0)
            if other > 0:
                ratios[seed].append(math.log(other / steps[end]))
        print(f"{recipe}: {first} over {second} {interval(ratios, math.exp)}; D^e, e = {interval(exponents)}")


def interval(of_seeds: dict[int, list[float]], shown: Callable[[float], float] = float) -> str:
    """Return the mean over seeds with its interval, and how many values of how many seeds there are."""
    values = [mean(own) for own in of_seeds.values()]
    if len(values) < 2:
        return "-"
    middle, low, high = (f"{shown(end):.2f}" for end in (mean(values), *student(np.array(values))))
    return f"{middle} [{low}, {high}] ({sum(map(len, of_seeds.values()))} of {len(values)} seeds)"


def read(path: Path, name: str) -> list[Row]:
    """Read the objects of a file of JSON Lines, or of the one of that name in a folder."""
    file = path / name if path.is_dir() else path
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard error."""
    error = f" ± {standard_error(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


if __name__ == "__main__":
    cli.run(main)
