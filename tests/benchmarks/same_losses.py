"""Train small reference runs at another commit and at this checkout, and compare what they log to the last bit.

    python tests/benchmarks/same_losses.py COMMIT [--only PATTERN] [--jobs N] [--cache DIR]

The runs are those of same_losses.yaml. Both sides are driven by their command lines alone, so modules may move between
the two; the other commit is checked out as a temporary git worktree. Both sides train on the corpus that the other
commit prepared; the one that this checkout prepares is compared with it byte by byte. Of each run every number of
metrics.jsonl but speed is compared, and the SHA-256 of every tensor in the safetensors of its last checkpoint.

Results are kept by commit (of this checkout: by its sources) and by what the run is, so the other commit is trained
once, and a comparison that was interrupted goes on where it was. Processes are forked from one that has imported the
libraries, and then run the script as `python launcher/pretrain.py` does.
Exit codes: 0 all equal; 1 a difference, shown in a table, or a run that failed.
"""

import argparse
import email
import gc
import hashlib
import json
import multiprocessing
import os
import platform
import random
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 600.0  # seconds for one start: only one that hangs takes as long
SPEED = {"tokens_per_second", "mfu", "step_time", "data_wait", "checkpoint_stall", "rank_skew", "slow_rank"}
REQUIRED = {"loss", "lr", "grad_norm"}  # a run that no longer logs these does not compare
SHOWN = 6  # differences of one run in the table

REFERENCE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RUNS: dict[str, list[dict[str, Any]]] = REFERENCE["runs"]
PREPARE: list[str] = [word.replace("EMAIL", str(Path(email.__file__).parent / "*.py")) for word in REFERENCE["prepare"]]
# Imports and what DeepSpeed imports when it starts take most of the time of a small run. Nothing here is of either side
PRELOADED = ["torch", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "torch.utils.cpp_extension"]
PRELOADED += ["transformers", "tokenizers", "safetensors.torch", "tensorboard", "omegaconf", "pydantic", "psutil"]
FORKS = multiprocessing.get_context("forkserver")

Results = dict[str, dict[str, dict[str, Any]]]
"""Run -> step -> key -> number; the step "weights" holds names of tensors -> SHA-256."""


class ReferenceRunError(RuntimeError):
    """Say why a reference run could not be made."""


@dataclass(frozen=True)
class Side:
    """Hold one of the two versions that are compared."""

    root: Path
    """Checkout whose launcher is started."""
    cache: Path
    """Folder of what is known of it."""
    commit: str | None
    """Commit that it must be; None: this checkout, with whatever is not committed yet."""

    def results(self, name: str, corpus: Path) -> Results:
        """Return the results of a reference run, trained now unless they are known.

        Raises:
            ReferenceRunError: a start of it failed, or ran code of another version.
        """
        reference = json.dumps([REFERENCE["config"], PREPARE, RUNS[name]])
        known = self.cache / f"{name}-{digest(reference, *versions())}.json"
        if not known.exists():
            with tempfile.TemporaryDirectory() as folder:
                results = self._train(name, Path(folder), corpus)
            if self.commit is None and self.cache.name != cache_name(self.root):
                raise ReferenceRunError("the sources changed since the comparison began; start it again")
            staging = known.with_suffix(".staging")
            staging.write_text(json.dumps(results), encoding="utf-8")
            staging.replace(known)
        found: Results = json.loads(known.read_text(encoding="utf-8"))
        return found

    def prepare(self) -> Path:
        """Return the corpus that this version prepares.

        Raises:
            ReferenceRunError: it prepares none.
        """
        corpus = self.cache / f"corpus-{digest(*PREPARE, *versions())}" / "email"
        corpus.parent.mkdir(parents=True, exist_ok=True)
        if not corpus.exists():
            self._start("prepare", [*PREPARE, "--output", str(corpus)], 1, corpus.parent)
        return corpus

    def _train(self, name: str, folder: Path, corpus: Path) -> Results:
        """Make every start of a reference run in an empty folder, and read what it left."""

        def placed(text: str) -> str:
            return text.replace("FOLDER", str(folder)).replace("CORPUS", str(corpus))

        config = folder / "config.yaml"
        config.write_text(placed(yaml.safe_dump(REFERENCE["config"])), encoding="utf-8")
        for start in RUNS[name]:
            verb = "export" if "export" in start else "pretrain"
            options = ["--config", str(config)] if verb == "pretrain" else []
            self._start(verb, [*options, *map(placed, start[verb])], start["ranks"], folder)
        results = {run.name: self._read(run) for run in sorted((folder / "runs").iterdir())}
        if (folder / "exported").exists():
            results["exported"] = {"weights": tensor_digests(folder / "exported")}
        return results

    def _read(self, run: Path) -> dict[str, dict[str, Any]]:
        """Return what a run logged at each step, and the digests of its last weights."""
        environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
        if self.commit not in (None, environment["git_commit"]):
            raise ReferenceRunError(f"the code of {environment['git_commit']} was run, not that of {self.commit}")
        steps: dict[str, dict[str, Any]] = {}
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            values = {key: value for key, value in record.items() if key not in SPEED and key != "step"}
            steps.setdefault(str(record["step"]), {}).update(values)
        last = max((run / "checkpoints").glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")))
        return {**steps, "weights": tensor_digests(last)}

    def _start(self, verb: str, words: Sequence[str], ranks: int, folder: Path) -> None:
        """Start a verb on some ranks, as srun does, and wait for the end."""
        script = self.root / "launcher" / f"{verb}.py"
        places: list[dict[str, str]] = [{}]
        if ranks > 1:
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
            places = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        log = folder / "output.log"
        processes = [FORKS.Process(target=run_script, args=(script, words, place, log)) for place in places]
        for process in processes:
            process.start()
        deadline = time.monotonic() + PATIENCE
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.02)
        for process in processes:
            process.kill()
            process.join()
        if any(process.exitcode for process in processes):
            codes = ", ".join(str(process.exitcode) for process in processes)
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            title = f"exit codes {codes} of {shlex.join([str(script), *words])}"
            raise ReferenceRunError("\n    ".join([title, *lines[-12:]]))


def run_script(script: Path, words: Sequence[str], place: Mapping[str, str], log: Path) -> None:
    """Become `python script words`, with its checkout on the path, at a place among the ranks."""
    gc.freeze()  # DeepSpeed collects garbage often; what was imported before the fork need not be walked each time
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(log.parent)
    os.environ.update(place, PYTHONPATH=str(script.parents[1]))
    sys.argv = [str(script), *words]
    sys.path[:1] = [str(script.parent), str(script.parents[1])]  # the first was the folder of this file
    runpy.run_path(str(script), run_name="__main__")


def clean_environment() -> None:
    """Forget what another launcher left, for the processes to come: one thread a rank, no GPU."""
    theirs = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM", "DS_", "TORCHELASTIC")
    for name in [name for name in os.environ if name.startswith(theirs)]:
        del os.environ[name]
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")


def free_port() -> int:
    """Return a port as this checkout's function does, which is not imported: runs of the other commit are forked."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):  # nobody answers there
                return port


def tensor_digests(folder: Path) -> dict[str, str]:
    """Return kind of file/name of tensor -> SHA-256 of its type, shape and bytes, of all safetensors in a folder."""
    digests = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, end = (start + offset for offset in entry["data_offsets"])
                tensor = f"{entry['dtype']}{entry['shape']}".encode() + content[first:end]
                digests[f"{file.stem.partition('-')[0]}/{name}"] = hashlib.sha256(tensor).hexdigest()
    return digests


def file_digests(folder: Path) -> dict[str, str]:
    """Return path -> SHA-256 of every file in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def digest(*texts: str) -> str:
    """Return a short name for some texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def cache_name(root: Path) -> str:
    """Return a name for the code of a checkout as it is now, committed or not."""
    files = sorted(path for room in ("launcher", "model", "data") for path in (root / room).rglob("*.py"))
    texts = (f"{path.relative_to(root)} {path.read_text(encoding='utf-8')}" for path in files)
    return f"here-{digest(*texts)}"


def versions() -> list[str]:
    """Return what else decides the last bit: the machine and the libraries."""
    packages = ("torch", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy")
    return [sys.version, platform.platform(), *(version(package) for package in packages)]


@dataclass(frozen=True)
class Difference:
    """Hold one value that is not the same on both sides."""

    run: str
    step: str
    key: str
    there: str
    here: str


@dataclass(frozen=True)
class Comparison:
    """Hold how the two sides of a reference run compare."""

    equal: int
    """Values that are the same on both sides."""
    differences: list[Difference]
    one_sided: list[str]
    """Metrics that only one side logs at all, with that side."""


def compare(name: str, there: Results, here: Results) -> Comparison:
    """Compare every value of a reference run; a metric that one side never logs is named and is not a difference."""
    equal, differences, one_sided = 0, [], set()
    for run in sorted(there.keys() | here.keys()):
        sides = {"there": there.get(run, {}), "here": here.get(run, {})}
        logged = {
            side: {key for step, values in steps.items() if step != "weights" for key in values}
            for side, steps in sides.items()
        }
        optional = (logged["there"] ^ logged["here"]) - REQUIRED
        for step in sorted(sides["there"].keys() | sides["here"].keys(), key=lambda step: (len(step), step)):
            values = {side: steps.get(step, {}) for side, steps in sides.items()}
            for key in sorted(values["there"].keys() | values["here"].keys()):
                shown = [show(each[key]) if key in each else "missing" for each in values.values()]
                if shown[0] == shown[1]:
                    equal += 1
                elif key in optional:
                    one_sided.add(f"{key} only {next(side for side, keys in logged.items() if key in keys)}")
                else:
                    differences.append(Difference(f"{name}/{run}", step, key, *shown))
    return Comparison(equal, differences, sorted(one_sided))


def show(value: Any) -> str:
    """Write a value so that two that differ in a bit are written differently."""
    return f"{value!r} {value.hex()}" if isinstance(value, float) else repr(value)


def table(differences: Sequence[Difference]) -> str:
    """Return differences as a table."""
    rows = [("run", "step", "key", "there", "here")]
    rows += [(each.run, each.step, each.key, each.there, each.here) for each in differences]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def git(*words: str) -> str:
    """Return what a git command in this repository prints."""
    command = ["git", "-C", str(REPOSITORY), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Check a commit out as a temporary worktree."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "worktree"
        git("worktree", "add", "--quiet", "--detach", str(root), commit)
        try:
            yield root
        finally:
            git("worktree", "remove", "--force", str(root))


def compare_all(
    names: Sequence[str], there: Side, here: Side, jobs: int
) -> Iterator[tuple[str, Comparison | ReferenceRunError]]:
    """Compare the corpora, then the reference runs, some at once; yield each as it is done."""
    corpora = there.prepare(), here.prepare()
    files: list[Results] = [{"email": {"weights": file_digests(corpus)}} for corpus in corpora]
    yield "corpus", compare("corpus", *files)

    def outcome(name: str) -> Comparison | ReferenceRunError:
        try:
            return compare(name, *(side.results(name, corpora[0]) for side in (there, here)))
        except ReferenceRunError as error:
            return error

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(outcome, name): name for name in names}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what to compare this checkout with")
    parser.add_argument("--only", default="", metavar="PATTERN", help="runs whose name matches a regular expression")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; each takes one or two cores (default: 1)")
    default = Path(tempfile.gettempdir()) / "same_losses"
    parser.add_argument("--cache", type=Path, default=default, help=f"where results stay (default: {default})")
    arguments = parser.parse_args()
    names = [name for name in RUNS if re.search(arguments.only, name)]
    if not names:
        parser.error(f"--only {arguments.only}: no run matches; there are {', '.join(RUNS)}")
    # Leave by an exception when asked to stop, so that the worktree goes as well
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    clean_environment()
    FORKS.set_forkserver_preload(PRELOADED)
    commit = git("rev-parse", "--verify", f"{arguments.commit}^{{commit}}")
    cache = arguments.cache.resolve()
    here = Side(REPOSITORY, cache / cache_name(REPOSITORY), None)
    differences: list[Difference] = []
    failed: list[str] = []
    equal = 0
    with checked_out(commit) as root:
        there = Side(root, cache / commit[:12], commit)
        for number, (name, outcome) in enumerate(compare_all(names, there, here, arguments.jobs)):
            place = f"{number:>2}/{len(names)} {name}"
            if isinstance(outcome, ReferenceRunError):
                failed.append(name)
                print(f"{place}: failed: {outcome}", flush=True)
                continue
            equal += outcome.equal
            differences += outcome.differences[:SHOWN]
            counts = f"{outcome.equal} equal, {len(outcome.differences)} different"
            print("; ".join([f"{place}: {counts}", *outcome.one_sided]), flush=True)
    if differences:
        print(f"\nThe first {SHOWN} differences of each run:\n{table(differences)}")
    if failed:
        print(f"\nFailed: {', '.join(failed)}")
    if not (differences or failed):
        print(f"All {equal} values of {len(names)} runs are those of {commit[:12]}, to the last bit")
    return 1 if differences or failed else 0


if __name__ == "__main__":
    sys.exit(main())
