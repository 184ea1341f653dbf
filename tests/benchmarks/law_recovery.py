"""Show whether a fit finds the law that made the data: published constants, from noisy runs like the paper's.

    python tests/benchmarks/law_recovery.py [--noise 0.005] [--draws 20]

It prints a JSON object: constant -> published, and over the draws of noise the mean and the standard deviation of what
was recovered and the median of the relative error. `C_T` is that of the published C_T exp(b), one number to a fit;
f_kv(P) stands for (gamma_kv, n_kv), which trade against each other.
"""

import argparse
import itertools
import json
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from plumbline.model.scaling_laws.fit import fit
from plumbline.model.scaling_laws.measured import Measured
from plumbline.model.scaling_laws.points import BF16, Points, points
from plumbline.model.scaling_laws.precision import PrecisionLaw
from plumbline.model.scaling_laws.published import KUMAR

POST_BITS = (3.0, 4.0, 5.0, 6.0)
SIZES = (30e6, 60e6, 110e6, 220e6)
TOKENS = (1.5e9, 3e9, 6e9, 13e9, 26e9)
DAMAGE = points(30e6, 26e9, post_bits=[3.0, 4.0, 5.0])


def main() -> None:
    """Draw, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.005, help="standard deviation of log loss, from run to run")
    parser.add_argument("--evaluation-noise", type=float, default=0.0005, help="the same, from point to point")
    parser.add_argument("--draws", type=int, default=20)
    arguments = parser.parse_args()
    at, runs = kumar_grid(POST_BITS)
    truth, found = answers(replace(KUMAR, C_T=KUMAR.C_T * float(np.exp(KUMAR.b)), b=0.0)), []
    for draw in range(arguments.draws):
        generator = np.random.default_rng(draw)
        noise = generator.normal(0, arguments.noise, runs.max() + 1)[runs]
        noise += generator.normal(0, arguments.evaluation_noise, len(at))
        law = fit(PrecisionLaw, Measured(at, KUMAR.loss(at) * np.exp(noise), runs)).law
        found.append(answers(law))
    print(json.dumps({"points": len(at), **{name: summary(name, truth, found) for name in truth}}, indent=2))


def kumar_grid(post_bits: tuple[float, ...] = ()) -> tuple[Points, NDArray[np.intp]]:
    """Return runs like those of arXiv 2411.04330: points, and the run number of each.

    They have 3 to 12 bits in weights, activations or KV cache alone, or in all three, and bf16. As in the paper, the
    two middle sizes lack the longest run, and there are no 3 bits in activations or KV cache. bf16 models are also
    quantized to each of `post_bits`.
    """
    widths = (4, 5, 6, 7, 8, 10, 12)
    low: list[tuple[float, ...]] = [(3.0, BF16, BF16), *((bits,) * 3 for bits in widths)]
    low += [tuple(bits if part == here else BF16 for part in range(3)) for here in range(3) for bits in widths]
    rows, runs, run = [], [], 0
    for size, tokens in itertools.product(SIZES, TOKENS):
        if tokens == TOKENS[-1] and size in SIZES[1:3]:
            continue
        for bits in [(BF16, BF16, BF16), *low]:
            for after in (np.inf, *(post_bits if bits == (BF16, BF16, BF16) else ())):
                rows.append((size, tokens, *bits, after))
                runs.append(run)
            run += 1
    return points(*np.array(rows).T), np.array(runs)


def answers(law: object) -> dict[str, float]:
    """Return constants, and curves where the constants are degenerate."""
    if not isinstance(law, PrecisionLaw):
        raise TypeError(f"{law!r}")
    curve = {f"f_kv({bits})": float(law.fraction("kv", np.array([float(bits)]))[0]) for bits in (4, 5, 6)}
    damage = dict(zip(("3 bits", "4 bits", "5 bits"), law.post_delta(DAMAGE).tolist(), strict=True))
    constants = {name: value for name, value in law.constants.items() if name not in ("beta", "b")}
    return {**constants, **curve, **{f"delta at {bits}": value for bits, value in damage.items()}}


def summary(name: str, truth: dict[str, float], found: list[dict[str, float]]) -> dict[str, float]:
    """Return one row of the table."""
    values = np.array([answer[name] for answer in found])
    error = np.median(np.abs(values / truth[name] - 1))
    numbers = {"published": truth[name], "mean": values.mean(), "sd": values.std(ddof=1), "median_error": error}
    return {key: float(f"{value:.4g}") for key, value in numbers.items()}


if __name__ == "__main__":
    main()
