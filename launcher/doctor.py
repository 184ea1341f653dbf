# PYTHON_ARGCOMPLETE_OK
"""Check before a run whether these nodes can carry it, and name the bad ones.

python launcher/doctor.py                                      this node
python launcher/doctor.py --config configs/quickstart.yaml     also what the run's checkpoints need
srun python launcher/doctor.py --config configs/NAME.yaml      all ranks of a job; also under torchrun and deepspeed

Start it with the same launchers and ranks as pretrain.py.
Exit codes: 0 fine, with or without warnings; 1 something is bad; 2 unusable arguments.
See docs/doctor.md.
"""

import argparse
from dataclasses import asdict
from typing import Any

from plumbline.launcher.runtime.commands import cli

BAD = 1  # exit code: a run would fail here


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--config", type=cli.existing, help="YAML file of the run (default: checks that need none)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the file")
    parser.add_argument("--limit", type=cli.positive, default=120, help="seconds that ranks wait for one another")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    cli.add_rank_options(parser)
    arguments = parser.parse_intermixed_args()
    if arguments.overrides and arguments.config is None:
        parser.error(f"{arguments.overrides[0]}: replaces a value of --config, which is not given")
    return arguments


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from plumbline.launcher.runtime.checkpoint import branch
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.sections import RunConfig
from plumbline.launcher.runtime.doctor import pairs
from plumbline.launcher.runtime.doctor.check import Finding, Place
from plumbline.launcher.runtime.doctor.examine import Examination, examine
from plumbline.launcher.runtime.doctor.meeting import open_store
from plumbline.launcher.runtime.doctor.start import local_need_of, need_of
from plumbline.launcher.runtime.doctor.table import CHECKS, PAIRS
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import read_world
from plumbline.launcher.runtime.system.log import LOG


def main() -> int:
    """Make all checks with all ranks, and print what was found on rank 0."""
    arguments = parse_arguments()
    world = read_world()
    folder, need, local = RunConfig(name="run").folder, None, None
    if arguments.config is not None:
        # No check depends on the stage that `auto` would choose: stages 1 to 3 divide the same states
        config = branch.resolve(load_config(arguments.config, arguments.overrides, min))
        plan = plan_run(config)
        folder, need, local = config.run.folder, need_of(config, plan), local_need_of(config, plan, world)
    try:
        store = open_store(world, arguments.limit)
        with process_group.quiet_stdout():  # NCCL prints there, and the output may be read by a program
            found = examine(Place(world, folder, need, local, store, arguments.limit), CHECKS)
    except ValueError as error:  # that ranks cannot connect is a result of the check
        LOG.error(error)
        return BAD
    if world.is_main and arguments.json:
        cli.print_json(document(found, world.size))
    elif world.is_main:
        print("\n".join([*table(found.findings), *bandwidth(found)]))
    return BAD if found.is_bad else 0


def document(found: Examination, ranks: int) -> dict[str, Any]:
    """Return the document of --json."""
    return {
        "verdict": "bad" if found.is_bad else "ok",
        "ranks": ranks,
        "findings": [asdict(finding) for finding in found.findings],
        "measured": {
            name: [{"rank": report.rank, "node": report.node, **report.facts} for report in reports]
            for name, reports in found.reports.items()
        },
    }


def table(findings: list[Finding]) -> list[str]:
    """Return a line for each finding, and one for its remedy."""
    nodes, checks = (
        max(len(text) for text in column) for column in zip(*((f.node, f.check) for f in findings), strict=True)
    )
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.node:<{nodes}}  {finding.check:<{checks}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{nodes}}  {'':<{checks}}  -> {finding.remedy}")
    return lines


def bandwidth(found: Examination) -> list[str]:
    """Return the table of pairs, if they were measured."""
    reports = found.reports.get(PAIRS.name, [])
    return pairs.table(reports) if reports else []


if __name__ == "__main__":
    cli.run_on_ranks(main)
