# PYTHON_ARGCOMPLETE_OK
"""Fit a scaling law to measured runs: loss from parameters, tokens and bits, with derived optima and warnings.

python launcher/fit.py runs/sweeps/precision --output laws/mine                       # a sweep's results.jsonl
python launcher/fit.py runs/sweeps/precision quantized/rtn --output laws/mine --hold-out largest-parameters
python launcher/fit.py points.jsonl --output laws/chinchilla --form chinchilla --bootstrap 500 --json

Writes law.json and figures to the output folder; `launcher/plan.py --law laws/mine/law.json` predicts with it. Each
row has parameters (without embedding and head), tokens, weight_bits, activation_bits, kv_bits (16: not quantized),
loss, and if they apply, post_bits, run, weight_format, group_size. docs/laws.md explains how to read the result.
"""

import argparse
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.commands import cli
from plumbline.model.scaling_laws.forms import FORMS, form_named


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "results", type=cli.existing, nargs="+", metavar="RESULTS", help="JSON Lines, or a folder that has them"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for law.json and the figures")
    parser.add_argument("--form", default="precision", help=f"one of {', '.join(FORMS)} (default: precision)")
    parser.add_argument(
        "--hold-out", metavar="HOW", help="runs to hold out: a share of them, largest-parameters or largest-tokens"
    )
    parser.add_argument(
        "--bootstrap",
        type=cli.natural,
        default=100,
        metavar="N",
        help="number of fits to resampled runs, for confidence bands; 0 for none",
    )
    parser.add_argument("--seed", type=cli.seed, default=0, help="seed of starting points, hold-out and resampling")
    parser.add_argument("--json", action="store_true", help="print law.json instead of the tables")
    return parser.parse_args()


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from plumbline.data.workspace import check_folder, check_replaceable_file
from plumbline.launcher.runtime.commands.progress import watched
from plumbline.launcher.runtime.laws.document import describe
from plumbline.launcher.runtime.laws.plots import plot_fit
from plumbline.launcher.runtime.laws.rows import read_rows
from plumbline.launcher.runtime.system.files import finite, write_json
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.scaling_laws.fit import fit

LAW = "law.json"
EXPLAINS = 0.5
"""R^2 below which a fit is reported to explain nothing: half of the variance of the losses."""
LAW_START = '{\n  "form": '


def main() -> None:
    """Read the rows, fit, resample, write and print the result."""
    arguments = parse_arguments()
    check_folder(arguments.output)
    check_replaceable_file(arguments.output / LAW, LAW_START)
    form = form_named(arguments.form)
    rows = read_rows(arguments.results)
    LOG.info(f"{len(rows.measured.at)} points from {len(rows.files)} file(s); form {arguments.form}: {form.TITLE}")
    if rows.left_out:
        LOG.info("left out: " + ", ".join(f"{count} {reason}" for reason, count in rows.left_out.items()))
    fitted = fit(form, rows.measured, arguments.hold_out, arguments.seed)
    draws = fitted.bootstrap(arguments.bootstrap, arguments.seed)
    resampled = list(watched(draws, arguments.bootstrap, "bootstrapped fit"))
    facts = describe(rows, fitted, resampled, arguments.hold_out)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output / LAW, finite(facts))
    figures = plot_fit(fitted, facts["curves"], arguments.output)
    if arguments.json:
        cli.print_json(facts)
        return
    print_fit(facts)
    print(f"\n{arguments.output / LAW} and {', '.join(figure.name for figure in figures)}")


def print_fit(facts: dict[str, Any]) -> None:
    """Print constants, scores, derived optima and warnings; say first if the law explains next to nothing."""
    if (explained := facts["fit"]["r2"]) is None or explained < EXPLAINS:
        shown = "-" if explained is None else f"{explained:.2f}"
        print(f"R^2 {shown}: this law explains next to nothing of these losses, and what follows from it is of no use")
    for name, value in facts["constants"].items():
        band = facts["bands"].get(name)
        print(f"{name:<10} {value:>12.5g}" + (f"   {band[0]:.4g} to {band[1]:.4g}" if band else ""))
    for name, title in (("fit", "loss"), ("fit_post", "post delta"), ("held_out", "held out")):
        scores = facts[name]
        if scores is not None:
            r2 = "-" if scores["r2"] is None else f"{scores['r2']:.4f}"
            error = scores["mean_absolute_error"]
            print(f"{title:<10} R^2 {r2}, mean absolute error {error:.4f} nats, {scores['points']} points")
    derived = facts["derived"]
    if derived.get("optimal_bits") is not None:
        band = derived["optimal_bits_band"]
        edges = f"   {band[0]:.2f} to {band[1]:.2f}" if band else ""
        if missing := derived["no_optimal_bits"]:
            edges += f"   ({missing:.0%} of the bootstrapped fits have none)"
        print(f"{'optimum':<10} {derived['optimal_bits']:.2f} bits in training, whatever the compute{edges}")
    for warning in facts["warnings"]:
        print(f"warning    {warning}")


if __name__ == "__main__":
    cli.run(main)
