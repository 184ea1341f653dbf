"""Try wrong inputs on the real commands and count what users meet: clear errors, and everything else.

    python -m tests.benchmarks.wrong_inputs [--only PATTERN] [--every N] [--jobs N] [--limit SECONDS] [--list]

The inputs are wrong values for every key of the configuration, derived from its schema (wrong_values.py), and the
command lines, damaged files and edited JSON of wrong_inputs.yaml. Each meets its command in a copy of a folder with a
corpus, runs, models and results, in a process that is forked from a warm one. An error is clear if the command ends
with exit code 2, without a traceback, in at most 25 lines that begin with `error:`, and standard error holds the word
that the case asks for: the key, the file or the option. `unclear` is an error that lacks it or is longer.
Prints JSON: how many are of each kind, and those that are not clear. Exit codes: 0 all are clear; 1 one is not.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import psutil
import yaml

from tests.benchmarks.wrong_folder import make_folder
from tests.benchmarks.wrong_values import wrong_overrides
from tests.damage import damage, reseal
from tests.fork_server import Forked, start_server

REPOSITORY = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_suffix(".yaml")
CLEAR, UNCLEAR, TRACEBACK, ACCEPTED, HANG = "clear", "unclear", "traceback", "accepted", "hang"
LINES, CHARACTERS = 25, 4000
"""Longest error that is called clear."""


@dataclass(frozen=True)
class Case:
    """Describe one wrong input: what is done to the folder, which command then runs, what its error must hold."""

    command: tuple[str, ...]
    says: str
    file: str | None = None
    """File that is damaged or edited."""
    damage: Any = None
    """Name of a damage of its bytes, or an edit of its JSON."""
    forged: bool = False
    """Whether the manifest of the checkpoint is made to fit."""
    env: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        variables = "".join(f"{name}={value} " for name, value in self.env.items())
        done = "" if self.file is None else f" # {self.file}: {self.damage}{', resealed' * self.forged}"
        return f"{variables}{shlex.join(self.command)}{done}"

    def prepare(self, folder: Path) -> None:
        """Damage what is to be damaged in a folder."""
        if self.file is None:
            return
        path = next(iter(sorted(folder.glob(self.file))))
        damage(path, self.damage)
        if self.forged:
            reseal(path)


@dataclass(frozen=True)
class Verdict:
    """Say what became of a case."""

    kind: str
    code: int | None
    errors: str


def read_cases(every: int = 1) -> Iterator[Case]:
    """Yield every `every`-th case of the schema, and all that are written by hand."""
    written = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    commands: dict[str, str] = written["commands"]
    for number, (overrides, key) in enumerate(wrong_overrides()):
        if number % every == 0:
            yield Case((*shlex.split(commands["new"]), *overrides), key)
    for entry in written["overrides"]:
        for says, tried in entry.items():
            for overrides in tried:
                more = [overrides] if isinstance(overrides, str) else overrides
                yield Case((*shlex.split(commands["new"]), *more), says)
    for entry in written["lines"]:
        command, says, env = entry["run"], entry["says"], entry.get("env", {})
        yield Case(tuple(shlex.split(commands.get(command, command))), says, env=env)
    for entry in written["files"]:
        for name in entry["commands"]:
            for how in entry["damages"]:
                command, says = tuple(shlex.split(commands.get(name, name))), Path(entry["file"]).name
                yield Case(command, entry.get("says", says), entry["file"], how, forged=entry.get("reseal", False))


def judge(case: Case, place: Path, original: Path, limit: float) -> Verdict:
    """Run one case in a copy of the folder."""
    with tempfile.TemporaryDirectory(prefix="wrong-") as name:
        folder = Path(shutil.copytree(original, Path(name) / "folder", symlinks=True))
        case.prepare(folder)
        verb, *arguments = case.command
        command = [str(REPOSITORY / "launcher" / f"{verb}.py"), *arguments]
        out, err = Path(name) / "out", Path(name) / "err"
        process = Forked(place, command, folder, {**environment(), **case.env}, out, err)
        try:
            code = process.wait(limit)
        except TimeoutExpired:
            end(process)
            return Verdict(HANG, None, _tail(out, err))
        return Verdict(
            kind_of(case, code, out.read_text(errors="replace"), err.read_text(errors="replace")), code, _tail(out, err)
        )


def kind_of(case: Case, code: int, output: str, errors: str) -> str:
    """Say which kind of end a command came to."""
    if code == 1 and re.search("^(damaged: |DIFFERS )", output, re.MULTILINE) and case.says in output:  # by --verify
        return CLEAR
    if "Traceback (most recent call last)" in output + errors or code not in (0, 2):
        return TRACEBACK
    if code == 0:
        return ACCEPTED
    found = re.search(r"error( on rank .*)?: (?P<told>[^\0]*)", errors)
    told = found["told"] if found else ""
    short = len(told) <= CHARACTERS and told.strip().count("\n") < LINES
    section, _, key = case.says.rpartition(".")
    spellings = (re.escape(case.says), rf"\b{section}: (.* )?{key} = ", rf"did you mean {key}\?")  # within a section
    return CLEAR if told and short and any(re.search(spelling, errors) for spelling in spellings) else UNCLEAR


def end(process: Forked) -> None:
    """Kill a process and what it started."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()


def environment() -> dict[str, str]:
    """Return our environment for one rank on a CPU, without a network to look for models in."""
    fixed = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM", "DS_", "TORCHELASTIC")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return {**kept, **fixed, "PYTHONPATH": str(REPOSITORY / "launcher")}


def _tail(out: Path, err: Path) -> str:
    text = err.read_text(errors="replace").strip() or out.read_text(errors="replace").strip()
    return text[-1500:]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases in whose line this is found")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th case of those from the schema")
    parser.add_argument("--jobs", type=int, default=2, help="cases that run at once")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="longer is a hang")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    parser.add_argument("--folder", type=Path, help="keep the folder that all begin with here, or take it from here")
    return parser.parse_args()


def run_cases(cases: Sequence[Case], where: Path, jobs: int, limit: float) -> list[Verdict]:
    """Return what became of each case; the folder that they begin with is made in `where` unless it is there."""
    place = where / "fork"
    place.unlink(missing_ok=True)
    start_server(place, os.getpid(), environment())
    original = where / "folder"
    if not original.is_dir():
        make_folder(original, lambda folder, command: succeed(place, folder, command))
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = []
        for case, verdict in zip(cases, pool.map(lambda each: judge(each, place, original, limit), cases), strict=True):
            verdicts.append(verdict)
            if verdict.kind != CLEAR:
                print(f"{len(verdicts)}/{len(cases)} {verdict.kind}: {case}", file=sys.stderr, flush=True)
    return verdicts


def succeed(place: Path, folder: Path, command: str) -> None:
    """Run a command that has to succeed."""
    verb, *arguments = shlex.split(command)
    out, err = folder / "out", folder / "err"
    process = Forked(place, [str(REPOSITORY / "launcher" / f"{verb}.py"), *arguments], folder, environment(), out, err)
    assert process.wait(300) == 0, f"{command}\n{_tail(out, err)}"


def main() -> int:
    """Run the cases and print the counts."""
    arguments = parse_arguments()
    cases = [case for case in read_cases(arguments.every) if re.search(arguments.only, str(case))]
    if arguments.list:
        print("\n".join(map(str, cases)))
        return 0
    with tempfile.TemporaryDirectory(prefix="wrong-") as name:
        where = arguments.folder or Path(name)
        where.mkdir(parents=True, exist_ok=True)
        verdicts = run_cases(cases, where, arguments.jobs, arguments.limit)
    counts = Counter(verdict.kind for verdict in verdicts)
    bad = [
        {"case": str(case), "says": case.says, "kind": verdict.kind, "code": verdict.code, "told": verdict.errors}
        for case, verdict in zip(cases, verdicts, strict=True)
        if verdict.kind != CLEAR
    ]
    print(
        json.dumps(
            {
                "cases": len(cases),
                **{kind: counts[kind] for kind in (CLEAR, UNCLEAR, TRACEBACK, ACCEPTED, HANG)},
                "not_clear": bad,
            },
            indent=2,
        )
    )
    return 0 if not bad else 1


if __name__ == "__main__":
    sys.exit(main())
