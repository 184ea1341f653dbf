"""Say in one number how far the loss curves of a sweep's sizes lie from one another, rule by rule.

    python tests/benchmarks/loss_collapse.py runs/sweeps/depth_curves [--curves rule] [--sizes size] [--parts 45]
    python tests/benchmarks/loss_collapse.py runs/sweeps/ladder_curves --normalized [--irreducible NATS]

It prints a JSON object: rule -> spread, noise, and the last loss of each size. Training losses are averaged over equal
parts of a run and over seeds. The spread is the largest minus the smallest of the sizes' curves, mean over what comes
after the first tenth, with a standard error from leaving out one seed at a time (jackknife); the noise is what the same
measure makes of one size's seeds, each taken for a size. Curves that collapse have a spread near the noise: over depth
as they are (arXiv 2309.16620), in nats per token; over sizes of which each has tokens for its size, --normalized (arXiv
2507.02119), which divides the loss above an irreducible one by what is left of it, held out, when a run ends.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plumbline.launcher.runtime.sweep.result import read_rows
from plumbline.launcher.runtime.system.files import read_json_lines

Array = npt.NDArray[np.float64]
Curves = Mapping[str, Mapping[int, Array]]  # size -> seed -> losses [parts]


def main() -> None:
    """Read the runs and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="folder of the sweep, whose run folders are there")
    parser.add_argument("--curves", default="rule", help="axis that is compared (default: rule)")
    parser.add_argument("--sizes", default="size", help="axis whose curves should collapse (default: size)")
    parser.add_argument("--parts", type=int, default=45, help="parts of a run (default: 45)")
    parser.add_argument("--normalized", action="store_true", help="over the loss with which a run ends")
    parser.add_argument(
        "--irreducible", type=float, default=0.0, metavar="NATS", help="loss that no model gets below (default: 0)"
    )
    arguments = parser.parse_args()
    if arguments.irreducible and not arguments.normalized:
        parser.error("--irreducible belongs to --normalized: differences of losses do not depend on it")
    found: dict[str, dict[str, dict[int, Array]]] = {}
    for row in read_rows(arguments.sweep / "results.jsonl"):
        if row.outcome.status == "finished":
            rule, size = str(row.labels[arguments.curves]), str(row.labels[arguments.sizes])
            losses = smoothed(Path(row.run) / "metrics.jsonl", arguments.parts)
            if arguments.normalized:
                assert row.outcome.loss is not None, "a finished run was evaluated"
                losses = (losses - arguments.irreducible) / (row.outcome.loss - arguments.irreducible)
            found.setdefault(rule, {}).setdefault(size, {})[row.seed] = losses
    print(json.dumps({rule: describe(curves) for rule, curves in found.items()}, indent=2))


def smoothed(metrics: Path, parts: int) -> Array:
    """Return the training losses of a run, averaged over parts as equal as its steps allow."""
    losses = np.array([record["loss"] for _, record in read_json_lines(metrics) if "loss" in record])
    return np.array([part.mean() for part in np.array_split(losses, parts)])


def describe(curves: Curves) -> dict[str, object]:
    """Return spread, noise and last losses of one rule."""
    seeds = sorted(set.intersection(*(set(of_seed) for of_seed in curves.values())))
    left_out = [spread(curves, [seed for seed in seeds if seed != gone]) for gone in seeds] if len(seeds) > 1 else []
    alone = [spread({str(seed): {0: losses} for seed, losses in size.items()}, [0]) for size in curves.values()]
    return {
        "seeds": len(seeds),
        "spread": spread(curves, seeds),
        "standard_error": math.sqrt((len(seeds) - 1) * float(np.var(left_out))) if left_out else None,
        "noise": float(np.mean(alone)),
        "last": {size: float(np.mean([losses[-1] for losses in of_seed.values()])) for size, of_seed in curves.items()},
    }


def spread(curves: Curves, seeds: Sequence[int]) -> float:
    """Return the mean distance between the outermost curves, each a mean over seeds, after the first tenth."""
    means = np.stack([np.mean([of_seed[seed] for seed in seeds], axis=0) for of_seed in curves.values()])
    return float(np.ptp(means[:, means.shape[1] // 10 :], axis=0).mean())


if __name__ == "__main__":
    main()
