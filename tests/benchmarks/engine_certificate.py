"""Hold the engine to plain PyTorch on generated models, and show that this comparison finds what is wrong.

    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/engine_certificate.py --cases 128 --seed 1
    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/engine_certificate.py --mutants --seed 1

Each case is a small model, drawn from the seed, on ZeRO stage 0 to 3, in fp32 or bf16, with one or three micro-batches,
under AdamW or Muon. It takes three steps by the engine on all ranks and by a plain loop that sees the whole batch.
Losses, gradients, norms, updates, optimizer states and the weights that each rank computes with are compared in each.
With --mutants, the engine is broken in one place at a time (certificate/broken_*.py; those that a pattern names), at
each stage and precision that the change fits, in up to --tries cases until one of them differs.
Rank 0 prints a table and, last, one JSON object. Exit code 1: a case differs, or under 95 % of the mutants are caught.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world

if TYPE_CHECKING:
    from tests.benchmarks.certificate.models import Case
    from tests.benchmarks.certificate.mutant import Mutant

LEAST_CAUGHT = 0.95


def certify(cases: int, seed: int, any_ranks: bool, offload: bool, world: World) -> list[dict[str, Any]]:
    """Return a row for each case that the engine serves: what it was, and the largest differences."""
    from tests.benchmarks.certificate.models import draw_case
    from tests.benchmarks.certificate.trial import compare

    rows = []
    drawn = [draw_case(seed, number) for number in range(cases)]
    if any_ranks:
        drawn = [case for case in drawn if case.stage < 3]
    if offload:
        drawn = [replace(case, offload=True) for case in drawn if case.stage > 0 and case.optimizer == "adamw"]
    for case in drawn:
        found = compare(case, world, any_ranks=any_ranks)
        largest = {quantity: asdict(difference) for quantity, difference in found.worst.items()}
        rows.append({"case": str(case), "exceeded": found.exceeded, "differences": largest})
        if world.is_main:
            verdict = f"DIFFERS in {', '.join(found.exceeded)}" if found.exceeded else "equal"
            print(f"| {case} | {found.furthest} | {verdict} |", flush=True)
    return rows


def hunt(pattern: str, seed: int, tries: int, world: World) -> list[dict[str, Any]]:
    """Return a row for each mutant at each stage and precision that it fits: by what it was caught, in which case."""
    from tests.benchmarks.certificate import broken_gradients, broken_updates
    from tests.benchmarks.certificate.models import draw_case

    mutants = broken_updates.MUTANTS + broken_gradients.MUTANTS
    cases = [draw_case(seed, number) for number in range(512)]
    rows = []
    for mutant in (mutant for mutant in mutants if re.search(pattern, mutant.change)):
        fitting = [case for case in cases if mutant.fits(case)]
        own = []
        for stage, precision in sorted({(case.stage, case.precision) for case in fitting}):
            there = [case for case in fitting if (case.stage, case.precision) == (stage, precision)]
            row: dict[str, Any] = {"mutant": mutant.change, "stage": stage, "precision": precision}
            own.append(row | catch(mutant, there[:tries], world))
        rows += own
        if world.is_main:
            by = Counter(quantity for row in own for quantity in row["caught_by"])
            missed = [f"stage {row['stage']} in {row['precision']}" for row in own if not row["caught_by"]]
            verdict = f"{len(own) - len(missed)} of {len(own)}"
            print(f"| {mutant.change} | {', '.join(by)} | {verdict} | {', '.join(missed)} |", flush=True)
    return rows


def catch(mutant: "Mutant", cases: "Sequence[Case]", world: World) -> dict[str, Any]:
    """Try a mutant in some cases, until one of them differs."""
    from tests.benchmarks.certificate.trial import compare

    found: dict[str, Any] = {"caught_by": [], "tried": 0}
    for case in cases:
        found |= {"tried": found["tried"] + 1, "case": str(case)}
        try:
            found["caught_by"] = compare(case, world, mutant).exceeded
        except RuntimeError as error:  # of all ranks alike
            found["caught_by"] = [f"an error: {str(error).splitlines()[0]}"]
        if found["caught_by"]:
            break
    return found


def facts(world: World, began: float) -> dict[str, Any]:
    """Return what the results were found with."""
    return {
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "ranks": world.size,
        "device": world.device.type,
        "cpus": os.cpu_count(),
        "seconds": round(time.perf_counter() - began),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Certify the engine, or hunt mutants; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--mutants", nargs="?", const="", metavar="PATTERN", help="break the engine, in one place at a time"
    )
    parser.add_argument("--tries", type=int, default=2, help="cases in which a mutant may stay unseen")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--any-ranks", action="store_true", help="certify the engine of run.reproducible=any_ranks, at stages 0 to 2"
    )
    kind.add_argument(
        "--offload", action="store_true", help="certify optimizer states in host memory, under AdamW at stages 1 to 3"
    )
    asked = parser.parse_args(arguments)
    world, began = read_world(), time.perf_counter()
    process_group.join(world, timeout_minutes=2.0)
    if asked.mutants is not None:
        rows = hunt(asked.mutants, asked.seed, asked.tries, world)
        good = sum(bool(row["caught_by"]) for row in rows)
        kinds = len({row["mutant"] for row in rows})
        passed, counts = good >= LEAST_CAUGHT * len(rows), {"mutants": kinds, "trials": len(rows), "caught": good}
    else:
        rows = certify(asked.cases, asked.seed, asked.any_ranks, asked.offload, world)
        good = sum(not row["exceeded"] for row in rows)
        passed, counts = good == len(rows), {"cases": len(rows), "equal": good}
    if world.is_main:
        print(json.dumps({**facts(world, began), "seed": asked.seed, **counts, "rows": rows}), flush=True)
    process_group.leave()
    return 0 if passed else 1


if __name__ == "__main__":
    code = main()
    os._exit(code)  # gloo's threads can abort a Python that ends among them
