# PYTHON_ARGCOMPLETE_OK
"""Write a page about a run, a comparison of several runs, a sweep, or the loss from quantization.

python launcher/report.py runs/quickstart                          # writes runs/quickstart/report.html
python launcher/report.py runs/quickstart --output /tmp/page.html
python launcher/report.py runs/quickstart --json                   # alerts, last values, also per block, for programs
python launcher/report.py runs/a runs/b runs/c --by time           # writes runs/comparison.html
python launcher/report.py runs/sweeps/grid                         # results of a sweep
python launcher/report.py quantized/quickstart                     # rows of quantize.py

A page is a single file. The run may still be in progress. For a finished run on star_graph, sudoku, maze or
reachability, the page shows examples that it solves and fails. docs/diagnostics.md explains the pages.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.commands import cli


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "folders",
        type=cli.existing,
        nargs="+",
        metavar="FOLDER",
        help="a run, several runs, a sweep, or rows of quantize.py",
    )
    parser.add_argument("--by", choices=("tokens", "flops", "time"), help="x axis for several runs (default: tokens)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the folder; for several, comparison.html beside the first)",
    )
    parser.add_argument("--json", action="store_true", help="also print one JSON document")
    arguments = parser.parse_args()
    if arguments.by is not None and len(arguments.folders) == 1:
        parser.error("--by is for several runs: name more of them, or leave it out")
    return arguments


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from plumbline.data.workspace import check_replaceable_file
from plumbline.launcher.runtime.quantize.rows import ROWS
from plumbline.launcher.runtime.report import comparison, quantization
from plumbline.launcher.runtime.report import page as run_page
from plumbline.launcher.runtime.report.html import START
from plumbline.launcher.runtime.report.overlay import By
from plumbline.launcher.runtime.sweep import page as sweep_page
from plumbline.launcher.runtime.sweep.names import CELLS
from plumbline.launcher.runtime.sweep.results import RESULTS
from plumbline.launcher.runtime.system.files import write_whole

Page = tuple[str, dict[str, Any], list[str]]
"""The page, the JSON document, and lines for the terminal."""
COMPARISON = "comparison.html"
"""The page of several runs."""


def main() -> None:
    """Read the folders, write the page, print a summary."""
    arguments = parse_arguments()
    # RUNS/* finds the page that was written beside them
    folders: list[Path] = [each for each in arguments.folders if each.name != COMPARISON or each.is_dir()]
    if not folders:
        raise ValueError(f"{arguments.folders[0]}: is a page of this command; give the folders of runs")
    if files := [folder for folder in folders if not folder.is_dir()]:
        raise ValueError(f"{files[0]}: is a file; give the folder of the run, sweep or rows that it belongs to")
    output: Path = arguments.output or default_output(folders)
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: no folder {output.parent}; make it first")
    if not os.access(output.parent, os.W_OK):  # such as the folder of somebody else's run
        raise ValueError(f"{output}: {output.parent} cannot be written to; name a file elsewhere by --output")
    if arguments.output is not None or len(folders) > 1:
        check_replaceable_file(output, START)
    text, document, lines = make_page(folders, arguments.by or "tokens")
    write_whole(output, text)
    if arguments.json:
        cli.print_json({**document, "report": str(output)})
        return
    for line in lines[:-1]:
        print(line)
    print(f"{output}: {lines[-1]}")


def default_output(folders: list[Path]) -> Path:
    """Return the path of the page: in the folder that it is about, or beside the first of several."""
    return folders[0] / "report.html" if len(folders) == 1 else folders[0].resolve().parent / COMPARISON


def make_page(folders: list[Path], by: By) -> Page:
    """Return the page of several runs, or that of one folder: a sweep, rows of quantize.py, or a run."""
    if len(folders) > 1:
        return comparison.make(folders, by)
    (folder,) = folders
    if (folder / RESULTS).is_file():
        return sweep_page.make(folder)
    if (folder / CELLS).is_file():
        raise ValueError(
            f"{folder}: a sweep without {RESULTS}, which is written once its runs have ended; `sweep.py --config FILE "
            "--summarize` writes what there is so far"
        )
    return quantization.make(folder) if (folder / ROWS).is_file() else run_page.make(folder)


if __name__ == "__main__":
    cli.run(main)
