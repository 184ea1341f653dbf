"""Look at a run: losses, speed, outliers and signal propagation by block, and what deserves attention, on one page.

python launcher/report.py runs/quickstart                          # writes runs/quickstart/report.html
python launcher/report.py runs/quickstart --output /tmp/page.html
python launcher/report.py runs/quickstart --json                   # alerts and last values, also by block, for programs

The page needs no other file. The run may still be going on. A finished run on star_graph, sudoku, maze or reachability
is shown with examples that it solves and fails.
"""

import argparse
from pathlib import Path

from plumbline.launcher.runtime.system import cli


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=cli.existing, metavar="RUN", help="run folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--json", action="store_true", help="also print one JSON document")
    return parser.parse_args()


if __name__ == "__main__":
    parse_arguments()  # ahead of the imports below, which take seconds: --help and mistakes are answered at once


from plumbline.data.workspace import check_replaceable_file
from plumbline.launcher.runtime.report.alerts import find_alerts
from plumbline.launcher.runtime.report.examples import solved_and_failed
from plumbline.launcher.runtime.report.history import read_history
from plumbline.launcher.runtime.report.page import START, page, summary
from plumbline.launcher.runtime.system.files import write_whole


def main() -> None:
    """Read, judge, write the page, print what was found."""
    arguments = parse_arguments()
    history = read_history(arguments.run)
    output: Path = arguments.output or arguments.run / "report.html"
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: no folder {output.parent}; make it first")
    if arguments.output is not None:
        check_replaceable_file(output, START)
    alerts = find_alerts(history)
    write_whole(output, page(history, alerts, solved_and_failed(history)))
    if arguments.json:
        cli.print_json({**summary(history, alerts), "report": str(output)})
        return
    for alert in alerts:
        print(alert)
    print(f"{output}: {len(alerts)} alert(s)")


if __name__ == "__main__":
    cli.run(main)
