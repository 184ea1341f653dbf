"""Provide what all tests share: a small real corpus, a small configuration, and ways to start real training runs.

`Pretrain` starts `launcher/pretrain.py` in processes of its own, by any launcher, and returns what a user would see:
exit codes, output and the run folder. Most processes are forked from one that has imported everything (fork_server.py);
`fresh=True` asks for new interpreters.
"""

import os

# Before torch, NumPy and SciPy are imported: the workers of pytest share the cores, and threads that wait spin on them
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are of CPUs, with as many ranks as they like
# Or torch.compile starts processes that import torch, for a few kernels
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import email
import fcntl
import gc
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from torch import Tensor

from plumbline.launcher.runtime.checkpoint.tensors import read_model
from tests.fork_server import Forked, start_server

REPOSITORY = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PATIENCE = 900.0
"""Seconds that a test waits for processes: only those that hang take as long, on any machine."""

settings.register_profile(
    "plumbline",
    derandomize=True,  # every run of the tests tries the same examples
    deadline=None,  # a busy machine is no failure
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],  # corpora are made once
)
settings.load_profile("plumbline")

CONFIG = """\
run: {{name: tiny, root: {root}}}
model:
  {{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 96}}
parameterization: {{rule: completep, base_hidden_size: 32, base_num_hidden_layers: 1}}
data: {{train: [{{path: {corpus}}}], sequence_length: 32, global_batch_size: 8, micro_batch_size: 2}}
optimizer: {{lr: 4.0e-3, grad_clip: 0.5}}
schedule: {{warmup: 2 steps}}
train: {{steps: 20, eval_interval: 10, eval_batches: 4}}
deepspeed: {{zero_stage: 1, precision: fp32}}
checkpoint: {{interval: 10}}
metrics: {{trackers: [], peak_tflops: 0.1}}
"""

SPEED = ("tokens_per_second", "mfu", "step_time", "data_wait", "checkpoint_stall", "rank_skew", "slow_rank")
"""Keys of metrics.jsonl that say how fast a step was."""


SLOWEST_FIRST = ("slurm", "distributed", "launcher", "model", "data")
"""Folders of tests in the order in which workers take their files, so that none is left alone with a long one."""


STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)
"""What a line of a run begins with in a file."""


PROOFS = [
    re.compile(line)
    for line in (REPOSITORY / "tests" / "proofs.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
"""What `make test` leaves to `make proofs`."""


UNTIL = float(os.environ.get("PLUMBLINE_TESTS_UNTIL", "inf"))
"""Seconds since 1970 after which no test begins."""


def pytest_configure() -> None:
    """Let no command that a test runs in this process listen to Ctrl-C, and collect tests without collecting garbage.

    A command would go on listening, count what later tests send to this process, and end it at the second one, which
    pytest-xdist answers by waiting for ever.
    """
    signal.signal(signal.SIGINT, lambda number, frame: signal.default_int_handler(number, frame))
    gc.disable()  # until all tests are collected, which makes many objects and no garbage


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the proofs, and sort the folders; within one, tests stay as they are."""
    marked = set()
    for item in items:
        name = item.nodeid  # made anew each time
        found = {line for line in PROOFS if line.search(name)}
        marked |= found
        if found:
            item.add_marker("proof")
    if config.args == [str(REPOSITORY / "tests")] or config.args == ["tests"]:
        assert marked == set(PROOFS), (
            f"tests/proofs.txt: no test matches {[line.pattern for line in set(PROOFS) - marked]}"
        )

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(REPOSITORY / "tests").parts[0]
        return SLOWEST_FIRST.index(folder) if folder in SLOWEST_FIRST else len(SLOWEST_FIRST)

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup() -> None:
    """Skip what there is no time for."""
    if time.time() > UNTIL:
        pytest.skip("no time is left (PLUMBLINE_TESTS_UNTIL)")


def pytest_collection_finish() -> None:
    """Keep what imports and collection have made out of every later garbage collection: DeepSpeed asks for many."""
    gc.freeze()
    gc.enable()


TOGETHER = ("tests/slurm/", "tests/launcher/runtime/harness/")
"""Folders whose tests one worker takes: they share a cluster, or slow imports."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep some folders together, too, with `--dist loadfile`."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            scope = str(super()._split_scope(nodeid))
            return next((folder for folder in TOGETHER if scope.startswith(folder)), scope)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@dataclass(frozen=True)
class Run:
    """Read the folder of a run, as a program does."""

    folder: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        """Return metrics.jsonl without the line that is being written."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """Return the records without speeds, which no two runs have in common."""
        return [{key: value for key, value in record.items() if key not in SPEED} for record in self.records]

    def column(self, key: str) -> dict[int, Any]:
        """Step -> value, of the records that have it; a step that was written twice is an error."""
        found = [(record["step"], record[key]) for record in self.records if key in record]
        assert len(dict(found)) == len(found), f"{self.folder}: a step is there twice"
        return dict(found)

    def weights(self, step: int) -> dict[str, Tensor]:
        """Return the fp32 weights in the checkpoint of a step."""
        return read_model(self.folder / "checkpoints" / f"step_{step:08d}")

    @property
    def checkpoints(self) -> list[str]:
        """Return the names of everything in checkpoints/, hidden ones included."""
        root = self.folder / "checkpoints"
        return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def written(folder: Path) -> dict[Path, int]:
    """Return when each file of a run was written, but for those in which who looks, or is refused, leaves a trace."""
    told = ("lock", "status.json", "attempts.jsonl")
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.stat().st_mtime_ns for path in files if path.name not in told and path.parent.name != "logs"}


@dataclass(frozen=True)
class Outcome:
    """Say how some processes ended."""

    codes: tuple[int, ...]
    """Exit code of the launcher, or of each rank where there is none."""
    stdout: str
    stderr: str
    run: Run

    @property
    def code(self) -> int:
        """Return the one exit code; ranks that disagree are an error."""
        assert len(set(self.codes)) == 1, f"exit codes {self.codes}\n{self.stdout}\n{self.stderr}"
        return self.codes[0]


@dataclass(frozen=True)
class Job:
    """Hold processes that were started and may still run."""

    processes: tuple["subprocess.Popen[bytes] | Forked", ...]
    logs: Path
    run: Run

    def wait(self, timeout: float = PATIENCE) -> Outcome:
        """Wait for all of them to end."""
        deadline = time.monotonic() + timeout
        try:
            codes = tuple(process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes)
        except subprocess.TimeoutExpired:
            stdout, stderr = self.texts()
            self.kill()
            pytest.fail(f"did not end within {timeout} s\n{stdout}\n{stderr}")
        return Outcome(codes, *self.texts(), self.run)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for something to become true while the processes run."""
        deadline = time.monotonic() + PATIENCE
        while True:
            ended = [process.poll() for process in self.processes]  # before what may come true just before the end
            if condition():
                return
            if any(code is not None for code in ended) or time.monotonic() > deadline:
                stdout, stderr = self.texts()
                self.kill()
                pytest.fail(f"never came true; exit codes {ended}\n{stdout}\n{stderr}")
            time.sleep(0.01)

    def texts(self) -> tuple[str, str]:
        """Return standard output and standard error so far, of all ranks, without the times that lines begin with."""
        return tuple(  # type: ignore[return-value]
            "".join(STAMP.sub("", path.read_text(errors="replace")) for path in sorted(self.logs.glob(f"*.{kind}")))
            for kind in ("out", "err")
        )

    def kill(self) -> None:
        """Send SIGKILL to all of them and to what they started."""
        for process in self.processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
                process.kill()
                process.wait(PATIENCE)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return our environment without what another launcher may have left in it; one thread for each rank."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM", "DS_", "TORCHELASTIC")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"
    fixed = {"PATH": path, "PYTHONPATH": str(REPOSITORY / "launcher"), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return {**kept, **fixed, "CUDA_VISIBLE_DEVICES": "", **(extra or {})}


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return a folder that all workers of pytest-xdist have in common."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


def once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Let the first worker that comes fill a folder; the others wait for it and then use the same one."""
    done = folder.with_name(f"{folder.name}.done")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def fork_server(shared_folder: Path, worker_id: str) -> Path:
    """Socket of the process that forks others, one for all workers; it ends with them."""
    owner = os.getpid() if worker_id == "master" else os.getppid()
    return once(shared_folder / "fork", lambda place: start_server(place, owner, environment()))


NewPort = Callable[[], int]
PORTS = range(24_000, 32_000)
"""Above those that jobs of the Slurm tests take by their numbers, below those of outgoing connections."""


@pytest.fixture(scope="session")
def new_port(shared_folder: Path) -> NewPort:
    """Return free TCP ports, each to one caller alone: a rank takes its port only a while later."""

    def take() -> int:
        with (shared_folder / "port").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            last = int(file.read() or random.choice(PORTS[:4000]))
            port: int = next(port for port in (*PORTS, *PORTS)[last - PORTS.start + 1 :] if is_free(port))
            file.truncate(0)
            file.write(str(port))
        return port

    return take


def is_free(port: int) -> bool:
    """Return whether no process listens at a port."""
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


Start = Callable[..., Job]


@pytest.fixture(scope="session")
def start(fork_server: Path, new_port: NewPort, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start a script of the repository on some ranks, by a launcher.

    launcher: "python" (one process), "ranks" (one process for each rank, as srun does), "torchrun", "deepspeed".
    fresh: new interpreters also for "python" and "ranks".
    """

    def begin(
        script: str | Path,
        arguments: Sequence[str | Path],
        run: Path,
        ranks: int = 1,
        launcher: str = "ranks",
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> Job:
        logs = tmp_path_factory.mktemp("logs")
        program = [str(REPOSITORY / script), *map(str, arguments)]
        port = str(new_port())
        own: list[dict[str, str]] = [{}]  # variables of each process
        before: list[str] = []  # what starts the program
        if launcher == "ranks":
            meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting} for rank in range(ranks)]
        elif launcher == "torchrun":
            before = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
        elif launcher == "deepspeed":
            before = [str(BIN / "deepspeed"), f"--num_accelerators={ranks}", f"--master_port={port}"]
        processes: list[subprocess.Popen[bytes] | Forked] = []
        for number, variables in enumerate(own):
            whole, paths = {**environment(env), **variables}, [logs / f"{number}.{kind}" for kind in ("out", "err")]
            if before or fresh:
                processes.append(interpreter([*before, *program], logs, whole, *paths))
            else:
                processes.append(Forked(fork_server, program, logs, whole, *paths))
        return Job(tuple(processes), logs, Run(run))

    return begin


def interpreter(
    arguments: Sequence[str], folder: Path, variables: Mapping[str, str], out: Path, err: Path
) -> "subprocess.Popen[bytes]":
    """Start a Python of its own."""
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen([sys.executable, *arguments], cwd=folder, env=variables, stdout=stdout, stderr=stderr)


Pretrain = Callable[..., Outcome]


@pytest.fixture(scope="session")
def start_pretrain(start: Start) -> Start:
    """Start launcher/pretrain.py on a configuration: (config, name, overrides, ranks, launcher) -> Job."""

    def begin(config: Path, name: str, overrides: Sequence[str] = (), **options: Any) -> Job:
        root = config.parent / "runs"
        arguments = ["--config", str(config), f"run.root={root}", f"run.name={name}", *overrides]
        return start("launcher/pretrain.py", arguments, root / name, **options)

    return begin


@pytest.fixture(scope="session")
def run_pretrain(start_pretrain: Start) -> Pretrain:
    """Start pretraining as `start_pretrain` does, and wait for its end."""
    return lambda *arguments, **options: start_pretrain(*arguments, **options).wait()


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def command(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Return what runs an entry point in a process of its own: first its name, then its options."""

    def run(verb: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        place = tmp_path_factory.getbasetemp()
        outcome = start(f"launcher/{verb}.py", arguments, place, launcher="python").wait()
        return subprocess.CompletedProcess([verb, *map(str, arguments)], outcome.code, outcome.stdout, outcome.stderr)

    return run


@pytest.fixture(scope="session")
def corpus(command: Command, shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the standard library's email package as a corpus of bytes: 20 documents, 370 thousand tokens.

    Each worker has a copy of its own, because some tests put another corpus in its place for a while.
    """

    def prepare(output: Path) -> None:
        source = Path(email.__file__).parent / "*.py"
        options = ("--tokenizer", "byte", "--workers", "1", "--validation-fraction", "0.005")  # one whole document
        done = command("prepare", "--source", source, *options, "--output", output)
        assert done.returncode == 0, done.stderr

    made = once(shared_folder / "email", prepare)
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("corpora") / "email"))


@pytest.fixture(scope="module")
def tiny_config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of two layers, twice as wide and deep as the base, so that its groups differ in all they can.

    Its runs lie beside it, so each file of tests has one: names of runs need not differ from those of another file.
    """
    folder = tmp_path_factory.mktemp("tiny")
    file = folder / "tiny.yaml"
    file.write_text(CONFIG.format(root=folder / "runs", corpus=corpus), encoding="utf-8")
    return file
