# PYTHON_ARGCOMPLETE_OK
"""Quantize models in many ways and measure the loss of each on held-out text, or save one as a Hugging Face folder.

python launcher/quantize.py --model runs/quickstart --data corpora/stdlib --recipes weights w8a8 --output quantized/qs
python launcher/quantize.py --model runs/a/checkpoints/step_* --data corpora/stdlib --recipes rtn-w4 --output q/a
python launcher/quantize.py --model runs/quickstart --data corpora/stdlib --recipes gptq-w4-g128 --save exports/qs-w4
python launcher/quantize.py --list                                           # recipes, and how their names are made

A row for each model and recipe is written to rows.jsonl, and one for each of its layers to layers.jsonl; report.md and
curves.png show them. Existing rows are not measured again. docs/quantization.md explains recipes and columns.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from plumbline.launcher.runtime.commands import cli

BATCH_SIZE = 8


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print the recipes and exit")
    parser.add_argument("--model", type=cli.model, nargs="+", help=f"{cli.MODEL}; or several of them")
    parser.add_argument("--average", help=cli.AVERAGE)
    parser.add_argument("--data", help="corpus: its held-out split is scored, its training split calibrates")
    parser.add_argument("--recipes", nargs="+", help="recipes, sets of them (--list), or YAML files of recipes")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, help="folder of rows and report")
    where.add_argument("--save", type=Path, help="write the quantized model to this folder instead; on the CPU")
    parser.add_argument(
        "--law", help="law.json of fit.py, or a published law, to compare its predictions with the measurements"
    )
    parser.add_argument(
        "--calibration-sequences",
        type=cli.positive,
        default=128,
        help="number of sequences for GPTQ, AWQ and static ranges",
    )
    parser.add_argument("--sequence-length", type=cli.positive, help="tokens per window (default: as in training)")
    parser.add_argument("--batch-size", type=cli.positive, help=f"windows per forward pass (default: {BATCH_SIZE})")
    parser.add_argument(
        "--max-batches", type=cli.positive, help="score only so many batches, evenly spread (default: all)"
    )
    cli.add_device_option(parser)
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON document")
    arguments = parser.parse_args()
    if not arguments.list:
        missing = [name for name in ("model", "data", "recipes") if getattr(arguments, name) is None]
        missing += ["output (or --save)"] if arguments.output is None and arguments.save is None else []
        if missing:
            parser.error(f"missing: {', '.join(f'--{name}' for name in missing)}; --list shows the recipes")
        if arguments.save is not None:
            for name in ("law", "batch_size", "max_batches"):
                if getattr(arguments, name) is not None:
                    parser.error(f"--{name.replace('_', '-')} does nothing with --save, which measures no loss")
            if arguments.device not in (None, "cpu"):
                parser.error(f"--device {arguments.device}: --save quantizes on the CPU; leave it out")
    arguments.batch_size = arguments.batch_size or BATCH_SIZE
    return arguments


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from plumbline.data.loader import ValidationBatches, calibration_batches
from plumbline.data.streams import SampleSource
from plumbline.data.workspace import check_folder, check_replaceable_file
from plumbline.launcher.runtime.config.stock import model_folder
from plumbline.launcher.runtime.laws.document import open_law
from plumbline.launcher.runtime.models.averages import check_average
from plumbline.launcher.runtime.models.facts import outline
from plumbline.launcher.runtime.models.held_out import check_tokenizer, open_data, window_length
from plumbline.launcher.runtime.models.open import DTYPES, LoadedModel, device_named, load_model
from plumbline.launcher.runtime.quantize.recipes import read_recipes
from plumbline.launcher.runtime.quantize.report import REPORT, TITLE, write_report
from plumbline.launcher.runtime.quantize.row import TextSettings
from plumbline.launcher.runtime.quantize.rows import (
    LAYERS,
    ROW_START,
    ROWS,
    SUPERSEDED,
    RowFile,
    Text,
    fitting,
    measure_missing,
    read_rows,
)
from plumbline.launcher.runtime.quantize.save import check_savable, save_quantized
from plumbline.launcher.runtime.system.exit_codes import COMPLETE, UNUSABLE
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.quantization.post_training.recipes import RULE, SETS, Recipe


def main() -> int:
    """Check the request of every model before any weights are read, then measure or save."""
    arguments = parse_arguments()
    if arguments.list:
        print_recipes()
        return COMPLETE
    wanted, asked = read_recipes(arguments.recipes)
    law = open_law(arguments.law).law if arguments.law else None
    if law is not None and "post_bits" not in law.USES:
        raise ValueError(f"--law {arguments.law}: says nothing of quantization after training; give another")
    device = device_named(arguments.device)
    check_average(arguments.average)
    arguments.model = [model_folder(each) for each in arguments.model]
    source = open_data(arguments.data, arguments.model[0], trains=True)
    outlines = [outline(each) for each in arguments.model]
    texts = [open_text(arguments, source, each) for each in outlines]
    if arguments.save is not None:
        save(arguments, outlines, texts, wanted)
        return COMPLETE
    check_folder(arguments.output)
    for name, start in ((ROWS, ROW_START), (SUPERSEDED, ROW_START), (LAYERS, ROW_START), (REPORT, TITLE)):
        check_replaceable_file(arguments.output / name, start)
    requests = [
        (path, fitting(model, wanted, text, asked), text)
        for path, model, text in zip(arguments.model, outlines, texts, strict=True)
    ]
    file, failed = RowFile(arguments.output), list[str]()
    for path, recipes, text in requests:
        try:
            model = load_model(path, device, DTYPES["fp32"], arguments.average)
            model.warn_without_thoughts()
            failed += measure_missing(model, recipes, text, file)
        except ValueError as error:  # of this model, such as a damaged checkpoint
            failed.append(str(error))
    rows = read_rows(arguments.output)  # including those of other processes
    if rows or not failed:
        report = write_report(rows, arguments.output, law)
        if arguments.json:
            cli.print_json([row.to_json() for row in rows])
        else:
            print(report.read_text(encoding="utf-8"), end="")
            print(f"\n{report}, {len(rows)} rows in {arguments.output}", flush=True)
    for reason in failed:
        LOG.error(f"not measured: {reason}")
    return UNUSABLE if failed else COMPLETE


def print_recipes() -> None:
    """Print the sets of recipes by name, and the rule by which recipes are named."""
    print(RULE)
    for name, members in SETS.items():
        print(f"\n{name}: {' '.join(members)}")


def open_text(arguments: argparse.Namespace, source: SampleSource, model: LoadedModel) -> Text:
    """Return the text that a model is scored and calibrated on, and check that it fits."""
    check_tokenizer(model, source)
    length = window_length(model, arguments.sequence_length)
    calibration = list(calibration_batches(source, length, arguments.calibration_sequences))
    return Text(
        source=source,
        batches=lambda: ValidationBatches(source.held_out, length, arguments.batch_size, arguments.max_batches),
        calibration=calibration,
        settings=TextSettings(
            data=str(source),
            data_fingerprint=source.fingerprint,
            sequence_length=length,
            batch_size=arguments.batch_size,
            max_batches=arguments.max_batches,
            calibration_sequences=sum(len(batch["input_ids"]) for batch in calibration),
        ),
    )


def save(
    arguments: argparse.Namespace, outlines: Sequence[LoadedModel], texts: Sequence[Text], wanted: Sequence[Recipe]
) -> None:
    """Write one model, quantized one way, as a Hugging Face folder.

    Raises:
        ValueError: several models or recipes were given.
    """
    if len(outlines) != 1 or len(wanted) != 1:
        raise ValueError(f"--save {arguments.save}: one model and one recipe, not {len(outlines)} and {len(wanted)}")
    (plan,), (text,), (recipe,) = outlines, texts, wanted
    check_savable(plan, recipe, len(text.calibration), arguments.save)  # before weights are read
    model = load_model(arguments.model[0], "cpu", DTYPES["fp32"], arguments.average)
    report = save_quantized(model, recipe, text.calibration, arguments.save)
    if arguments.json:
        cli.print_json(asdict(report))
    else:
        print(report, flush=True)
    for caution in report.cautions:
        LOG.warning(caution)


if __name__ == "__main__":
    cli.run(main)
