"""What all tests share: a small real corpus, a small model's configuration, and ways to start real training runs.

`Pretrain` starts `launcher/pretrain.py` in processes of its own, by any launcher, and returns what a user would see:
exit codes, output and the run folder. `work` runs a worker script of the tests the same way.
"""

import email
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
PATIENCE = 900.0
"""Seconds that a test waits for processes: only those that hang take as long, on any machine."""

CONFIG = """\
run: {{name: tiny, root: {root}}}
model:
  {{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 96}}
parameterization: {{rule: completep, base_hidden_size: 32, base_num_hidden_layers: 1}}
data: {{train: [{{path: {corpus}}}], sequence_length: 32, global_batch_size: 8, micro_batch_size: 2}}
optimizer: {{lr: 4.0e-3, grad_clip: 0.5}}
schedule: {{warmup_steps: 2}}
train: {{steps: 20, eval_interval: 10, eval_batches: 4}}
deepspeed: {{zero_stage: 1, precision: fp32}}
checkpoint: {{interval: 10}}
metrics: {{tensorboard: false, peak_tflops: 0.1}}
"""


@dataclass(frozen=True)
class Run:
    """The folder of a run, as a program reads it."""

    folder: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        """metrics.jsonl without the line that is being written."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def column(self, key: str) -> dict[int, Any]:
        """Step -> value, of the records that have it; a step that was written twice is an error."""
        found = [(record["step"], record[key]) for record in self.records if key in record]
        assert len(dict(found)) == len(found), f"{self.folder}: a step is there twice"
        return dict(found)

    def weights(self, step: int) -> dict[str, Tensor]:
        """The fp32 weights in the checkpoint of a step."""
        files = sorted((self.folder / "checkpoints" / f"step_{step:08d}").glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    @property
    def checkpoints(self) -> list[str]:
        """Names of everything in checkpoints/, hidden ones included."""
        root = self.folder / "checkpoints"
        return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


@dataclass(frozen=True)
class Outcome:
    """How some processes ended."""

    codes: tuple[int, ...]
    """Exit code of the launcher, or of each rank where there is none."""
    stdout: str
    stderr: str
    run: Run

    @property
    def code(self) -> int:
        """The one exit code; ranks that disagree are an error."""
        assert len(set(self.codes)) == 1, f"exit codes {self.codes}\n{self.stdout}\n{self.stderr}"
        return self.codes[0]


@dataclass(frozen=True)
class Job:
    """Processes that were started and may still run."""

    processes: tuple["subprocess.Popen[bytes]", ...]
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
        while not condition():
            ended = [process.poll() for process in self.processes]
            if any(code is not None for code in ended) or time.monotonic() > deadline:
                stdout, stderr = self.texts()
                self.kill()
                pytest.fail(f"never came true; exit codes {ended}\n{stdout}\n{stderr}")
            time.sleep(0.01)

    def texts(self) -> tuple[str, str]:
        """Standard output and standard error so far, of all ranks."""
        return tuple(  # type: ignore[return-value]
            "".join(path.read_text(errors="replace") for path in sorted(self.logs.glob(f"*.{kind}")))
            for kind in ("out", "err")
        )

    def kill(self) -> None:
        """SIGKILL to all of them and to what they started."""
        for process in self.processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait()


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without what another launcher may have left in it; one thread for each rank."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM", "DS_", "TORCHELASTIC")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    fixed = {"PATH": path, "PYTHONPATH": str(REPOSITORY / "launcher"), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return {**kept, **fixed, "CUDA_VISIBLE_DEVICES": "", **(extra or {})}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Start = Callable[..., Job]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start a script of the repository on some ranks, by a launcher.

    launcher: "python" (one process), "ranks" (one process for each rank, as srun does), "torchrun", "deepspeed".
    """

    def begin(
        script: str | Path,
        arguments: Sequence[str | Path],
        run: Path,
        ranks: int = 1,
        launcher: str = "ranks",
        env: Mapping[str, str] | None = None,
    ) -> Job:
        logs = tmp_path_factory.mktemp("logs")
        program = [str(REPOSITORY / script), *map(str, arguments)]
        port = str(free_port())
        commands: list[tuple[list[str], dict[str, str]]] = []
        if launcher == "ranks":
            for rank in range(ranks):
                places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                commands.append(([sys.executable, *program], {**places, **meeting}))
        elif launcher == "python":
            commands.append(([sys.executable, *program], {}))
        elif launcher == "torchrun":
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
            commands.append(([*torchrun, f"--master-port={port}", *program], {}))
        else:
            deepspeed = [str(Path(sys.executable).parent / "deepspeed"), f"--num_accelerators={ranks}"]
            commands.append(([*deepspeed, f"--master_port={port}", *program], {}))
        processes = []
        for number, (command, places) in enumerate(commands):
            with (logs / f"{number}.out").open("wb") as out, (logs / f"{number}.err").open("wb") as err:
                variables = {**environment(env), **places}
                processes.append(subprocess.Popen(command, cwd=logs, env=variables, stdout=out, stderr=err))
        return Job(tuple(processes), logs, Run(run))

    return begin


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
    """As `start_pretrain`, to the end."""
    return lambda *arguments, **options: start_pretrain(*arguments, **options).wait()


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def command() -> Command:
    """Run an entry point in a process of its own: command("plan", "--config", path)."""

    def run(verb: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        words = [sys.executable, str(REPOSITORY / "launcher" / f"{verb}.py"), *map(str, arguments)]
        return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)

    return run


@pytest.fixture(scope="session")
def corpus(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The standard library's email package as a corpus of bytes: 20 documents, 370 thousand tokens."""
    output = tmp_path_factory.mktemp("corpora") / "email"
    source = Path(email.__file__).parent / "*.py"
    share = ("--validation-fraction", "0.005")  # one whole document
    done = command("prepare", "--source", source, "--tokenizer", "byte", "--output", output, *share)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="session")
def tiny_config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two narrow layers, twice as wide and as deep as the base, so that parameter groups differ in all they can."""
    folder = tmp_path_factory.mktemp("tiny")
    file = folder / "tiny.yaml"
    file.write_text(CONFIG.format(root=folder / "runs", corpus=corpus), encoding="utf-8")
    return file
