# PYTHON_ARGCOMPLETE_OK
"""Check a run against its records by computing parts of it again, or find the samples that caused a spike.

python launcher/replay.py runs/quickstart --verify                  # check its records, and compute one window again
python launcher/replay.py runs/quickstart --verify --windows 5      # five random windows; 0 checks only the records
python launcher/replay.py runs/quickstart --verify --most-steps 50  # only the first 50 steps of each window
python launcher/replay.py runs/quickstart --step 123                # which samples caused the spike of step 123
deepspeed --quiet --num_accelerators 2 launcher/replay.py runs/quickstart --verify    # a run of two ranks, to the bit

With the run's number of ranks, kind of machine and versions, steps are equal to the last bit. With another number of
ranks, samples are equal, and numbers are within a tolerance that is printed. Nothing is written to the run folder.
Exit codes: 0 verified, or samples found; 1 the run differs, or no sample is to blame; 2 the run cannot be replayed.
"""

import argparse

from plumbline.launcher.runtime.commands import cli

DIFFERS = 1  # exit code
OF_VERIFY, OF_STEP = ("windows", "most_steps"), ("full",)
"""Options that go with --verify alone, and with --step alone."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument("run", type=cli.existing, metavar="RUN", help="run folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--verify", action="store_true", help="check that the run matches its records")
    what.add_argument("--step", type=cli.positive, metavar="N", help="find the samples that caused the spike of step N")
    parser.add_argument(
        "--windows",
        type=cli.natural,
        metavar="N",
        help="with --verify: number of windows to compute again (default: 1)",
    )
    parser.add_argument(
        "--most-steps", type=cli.positive, metavar="N", help="with --verify: compute at most N steps of each window"
    )
    parser.add_argument("--full", action="store_true", help="with --step: show texts in full")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    cli.add_rank_options(parser)
    arguments = parser.parse_args()
    needed, names = ("--step", OF_STEP) if arguments.verify else ("--verify", OF_VERIFY)
    if misplaced := cli.given(arguments, names):
        parser.error(f"{misplaced[0]} goes with {needed}: give it, or leave this out")
    return arguments


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from plumbline.launcher.runtime.inspection.seen import SeenRun
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.collectives import from_main
from plumbline.launcher.runtime.ranks.world import World, read_world
from plumbline.launcher.runtime.replay.record import RunRecord, contradictions, read_record
from plumbline.launcher.runtime.replay.spike import explain, standings
from plumbline.launcher.runtime.replay.text import spike_facts, spike_lines, standing_lines, verify_facts, verify_lines
from plumbline.launcher.runtime.replay.windows import Verdict, Verification, Window, recompute_some
from plumbline.launcher.runtime.system import determinism


def main() -> int:
    """Read the run's records on rank 0, and compute steps again on all ranks."""
    arguments = parse_arguments()
    world = read_world()
    record = read_record(arguments.run, contents=arguments.verify and world.is_main)
    return verify(arguments, record, world) if arguments.verify else find(arguments, record, world)


def begin(record: RunRecord, world: World) -> None:
    """Join the process group, with the run's settings of torch."""
    config = record.config
    determinism.enforce(config.run.repeats, world.device)
    process_group.join(world, config.deepspeed.timeout_minutes)


def verify(arguments: argparse.Namespace, record: RunRecord, world: World) -> int:
    """Compare the records of a run with each other, and with windows that are computed again."""
    wanted = 1 if arguments.windows is None else arguments.windows
    verdicts: list[Verdict] = []
    left_out: list[Window] = []
    if wanted:
        begin(record, world)
        record = from_main(lambda: record, world)  # only rank 0 has read every byte of the checkpoints
        verdicts, left_out = recompute_some(record, wanted, arguments.most_steps, world)
        process_group.leave()
    found = Verification(record, contradictions(record), verdicts, left_out)
    if world.is_main and arguments.json:
        cli.print_json(verify_facts(found))
    elif world.is_main:
        print("\n".join(verify_lines(found, wanted)))
    return 0 if found.first is None else DIFFERS


def find(arguments: argparse.Namespace, record: RunRecord, world: World) -> int:
    """Find the samples that caused the spike of a step, and show them."""
    step = arguments.step
    standing = standings(record, step)
    spike = next((its for its in standing if its.is_spike), None)
    if spike is None:
        if world.is_main and arguments.json:
            cli.print_json({"run": str(record.folder), "step": step, "spike": None, "causes": []})
        elif world.is_main:
            print("\n".join([*standing_lines(step, standing), "no spike: both are within the usual range"]))
        return DIFFERS
    begin(record, world)
    explanation = explain(record, spike, step, world)
    process_group.leave()
    found = explanation.found
    if world.is_main:
        seen = SeenRun(record.folder)
        causes = [(each, seen.decoders[each.source]) for each in seen.step(step).samples if each.number in found.causes]
        if arguments.json:
            cli.print_json(spike_facts(record, step, spike, explanation, causes))
        else:
            print("\n".join(spike_lines(record, step, standing, explanation, causes, arguments.full)))
    return 0 if found.causes and found.explained else DIFFERS


if __name__ == "__main__":
    cli.run_on_ranks(main)
