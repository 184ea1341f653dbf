# PYTHON_ARGCOMPLETE_OK
"""Export a run to a Hugging Face folder, verified by reloading it with transformers; docs/export.md lists the targets.

python launcher/export.py --model runs/quickstart --output exports/quickstart
python launcher/export.py --model runs/base/checkpoints/step_00001000 --output exports/base --target granite
python launcher/export.py --model runs/base --output exports/base-average --average last:5 --dtype bf16
python launcher/export.py --model runs/outlier-protected --output exports/op --target compat
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from plumbline.launcher.runtime.commands import cli


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--model", type=cli.own_model, required=True, help="run (its newest checkpoint) or checkpoint")
    parser.add_argument("--average", help=cli.AVERAGE)
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--target", default="auto", help="auto (stock class, else native) or a class of docs/export.md")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="type of the weights in the folder; bf16 halves it, and is rounded to after the check",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it is an export")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


import torch

from plumbline.launcher.runtime.export.hugging_face import check_exportable, check_output, export
from plumbline.launcher.runtime.models.facts import outline
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.system.log import LOG


def main() -> None:
    """Load the model in fp32, export it, print how the reloaded folder compares."""
    arguments = parse_arguments()
    check_output(arguments.output, arguments.overwrite)  # before weights are read
    check_exportable(outline(arguments.model), arguments.target)
    model = load_model(arguments.model, torch.device("cpu"), average=arguments.average, with_objective=True)
    report = export(model, arguments.output, arguments.target, arguments.overwrite, arguments.dtype == "bf16")
    if arguments.json:
        cli.print_json({"model": str(model.source), "average": model.average, **asdict(report)})
        return
    averaged = "" if model.average is None else f", {model.average}"
    print(f"{report.folder}: {report.architecture}, from {model.source}{averaged}")
    print(f"reloaded with transformers: {report.agreement}")
    if report.headroom is not None:
        room = report.headroom
        print(f"constant channels: {room.constant_channels}, stream {room.largest:.1e} of at most {room.limit:.1e}")
    if report.lookahead is not None:
        print(f"thoughts, by the folder's lookahead.py: {report.lookahead}")
    if report.left_out is not None:
        print(f"left out: {report.left_out}, for which no class has code")
    for caution in report.cautions:
        LOG.warning(caution)
    if report.own_code:
        print("the folder brings its own code: load it with trust_remote_code=True")


if __name__ == "__main__":
    cli.run(main)
