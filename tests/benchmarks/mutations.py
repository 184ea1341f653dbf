"""Break the code in one place at a time and see that a test turns red.

    python tests/benchmarks/mutations.py [--only PATTERN] [--results FILE]

The mutations are those of mutations_of/*.yaml: a text in a file, what takes its place, and the narrowest tests that
must fail then. They are made in a temporary copy of this checkout, uncommitted changes included. The tests of each
mutation must pass before it is made. What was found is kept in FILE, until the mutated file or one of its tests
changes, so that a start that was interrupted goes on where it was.
Exit codes: 0 every mutation turned a test red; 1 one did not; 2 a text is not there, or not once.
"""

import argparse
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).with_name("mutations_of")
PATIENCE = 300  # seconds for one test: a mutation may make it wait for ever, which is red
PRELOADED = ("pytest", "hypothesis", "torch", "safetensors.torch", "transformers", "omegaconf", "pydantic")
"""Imported once; the tests of each mutation run in a fork. Nothing of ours is among them."""
OF_RANKS = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "matplotlib.pyplot",
    "scipy.stats",
    "torch._inductor.compile_fx",
)
"""Imported once more, by the server from which the servers of tests are forked (tests/fork_server.py)."""
RED, GREEN = "red", "GREEN"


@dataclass(frozen=True)
class Mutation:
    """Describe one change that a test must notice."""

    change: str
    """What is wrong afterwards, in words."""
    file: str
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Test files, functions or cases (file::function[case]) for pytest, one of which must fail."""


def read_mutations(folder: Path = FOLDER) -> list[Mutation]:
    """Return the mutations of all files, in their order."""
    found = []
    for file in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
            found.append(Mutation(**{**entry, "tests": tuple(entry["tests"].split())}))
    return found


def problems(mutations: list[Mutation], root: Path) -> Iterator[str]:
    """Say of which mutations the text or the tests are not in a checkout, in one line each."""
    for mutation in mutations:
        file = root / mutation.file
        count = file.read_text(encoding="utf-8").count(mutation.old) if file.is_file() else 0
        if count != 1:
            yield f"{mutation.file}: the text of {mutation.change!r} is there {count} times, not once"
        for test in mutation.tests:
            name, _, function = test.partition("[")[0].partition("::")
            path = root / name
            wanted = f"def {function}(" if function else "def test_"
            if not path.is_file() or wanted not in path.read_text(encoding="utf-8"):
                yield f"{test}: no such test, for {mutation.change!r}"


def copy_checkout(target: Path) -> None:
    """Copy what git tracks, or would, as it stands here."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)


@contextmanager
def mutated(mutation: Mutation, root: Path) -> Iterator[None]:
    """Make a change in a copy, and undo it afterwards."""
    file = root / mutation.file
    text = file.read_text(encoding="utf-8")
    try:
        write(file, text.replace(mutation.old, mutation.new))
        yield
    finally:
        write(file, text)


def write(file: Path, text: str) -> None:
    """Write a source file and forget its bytecode, which Python would take for current within the same second."""
    file.write_text(text, encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def run_tests(tests: tuple[str, ...], root: Path) -> int:
    """Run tests of a copy in a fork of this process; returns pytest's exit code (0: all passed, 1: one failed)."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.chdir(root)
    sys.path[0] = str(root)
    with (root / "output.log").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    pytest = importlib.import_module("pytest")
    os._exit(pytest.main([*tests, "-q", "-x", "-p", "no:cacheprovider", f"--timeout={PATIENCE}"]))


def serve_forks(root: Path) -> None:
    """Start a server that the tests' own are forked from, so that each of those imports nothing but ours.

    `start_server` cannot be imported for it: the package `tests` would then be this checkout's in every fork.
    """
    place = root / "forks"
    script = root / "tests" / "fork_server.py"
    program = [sys.executable, str(script), str(place), str(os.getpid()), *PRELOADED, *OF_RANKS]
    ours = {"PYTHONPATH": str(root / "launcher"), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    kept = {**os.environ, **ours, "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    server = subprocess.Popen(program, env=kept, stdin=subprocess.DEVNULL)
    while not place.exists():
        assert server.poll() is None, "the server has ended"
        time.sleep(0.05)
    os.environ["PLUMBLINE_FORK_SERVER"] = str(place)


def key(mutation: Mutation, root: Path) -> str:
    """Return what a verdict depends on, as far as it is kept: the mutation, the mutated file and the tests."""
    files = [mutation.file, *(test.partition("::")[0] for test in mutation.tests)]
    texts = [repr(mutation), *((root / file).read_text(encoding="utf-8") for file in files)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def verdict_of(mutation: Mutation, root: Path, passed: set[tuple[str, ...]]) -> str:
    """Make a mutation in a copy and say how its tests take it; `passed` has those that passed without one."""
    if mutation.tests not in passed:
        if code := run_tests(mutation.tests, root):
            return f"red without it (pytest exit code {code})"
        passed.add(mutation.tests)
    with mutated(mutation, root):
        code = run_tests(mutation.tests, root)
    return {0: GREEN, 1: RED}.get(code, f"no verdict (pytest exit code {code})")


def main() -> int:
    """Make every mutation, one after the other, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="regular expression over files, changes and tests"
    )
    parser.add_argument("--results", type=Path, default=REPOSITORY / "runs" / "mutations.jsonl", help="what was found")
    arguments = parser.parse_args()
    chosen = [mutation for mutation in read_mutations() if re.search(arguments.only, repr(mutation))]
    if wrong := list(problems(chosen, REPOSITORY)):
        print(*wrong, sep="\n", file=sys.stderr)
        return 2
    results: Path = arguments.results
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    known = {line["key"]: line["verdict"] for line in map(json.loads, lines)}
    for name in PRELOADED:
        importlib.import_module(name)
    verdicts, passed = [], set[tuple[str, ...]]()
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        serve_forks(Path(folder))
        for number, mutation in enumerate(chosen, start=1):
            began, verdict = time.monotonic(), known.get(key(mutation, Path(folder)))
            if verdict != RED:
                verdict = verdict_of(mutation, Path(folder), passed)
                with results.open("a", encoding="utf-8") as file:
                    line = {"key": key(mutation, Path(folder)), "verdict": verdict, "change": mutation.change}
                    file.write(json.dumps(line) + "\n")
            verdicts.append(verdict)
            seconds = time.monotonic() - began
            print(f"{number:>3}/{len(chosen)} {seconds:>4.0f} s  {verdict:<6} {mutation.change}", flush=True)
    print(f"\n{verdicts.count(RED)} of {len(chosen)} mutations turned a test red")
    for mutation, verdict in zip(chosen, verdicts, strict=True):
        if verdict != RED:
            print(f"{verdict}: {mutation.file}: {mutation.change} ({' '.join(mutation.tests)})")
    return int(set(verdicts) - {RED} != set())


if __name__ == "__main__":
    sys.exit(main())
