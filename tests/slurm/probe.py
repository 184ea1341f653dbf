"""A probe in place of pretrain.py: a job of slurm/pretrain.sbatch that takes a second.

It writes down the environment that each rank of each attempt finds, then ends the way its arguments say. So everything
between sbatch and the ranks is the real thing.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

REPOSITORY = Path(__file__).resolve().parents[2]
SLURM_FOLDER = REPOSITORY / "slurm"

PROBE = """
import json, os, signal, sys, time
stop = []
signal.signal(signal.SIGUSR1, lambda *_: stop.append(True))
job, rank = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_PROCID"])
attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
folder = os.path.dirname(sys.argv[2])
settings = dict(word.split("=", 1) for word in sys.argv[3:])
with open(f"{folder}/job-{job}-attempt-{attempt}-rank-{rank}.json", "w") as file:
    json.dump({"environment": dict(os.environ), "arguments": sys.argv[1:]}, file)
ending = settings["probe.endings"].split("/")[int(attempt)]
while "hang" in ending or ("alone" in ending and rank):
    time.sleep(0.05)
if "stop" in ending:
    while not stop:
        time.sleep(0.05)
    time.sleep(rank)  # ranks never end at the same instant
while "later" in ending and not os.path.exists(f"{folder}/now"):
    time.sleep(0.05)
if "saved" in ending:
    os.makedirs(f"{folder}/runs/{settings['run.name']}/checkpoints/step_{int(attempt) + 1:08d}", exist_ok=True)
if "said" in ending:
    print(f"rank {rank} here", os.environ.get("IMAGE"))
if "killed" in ending:
    os.kill(os.getpid(), signal.SIGKILL) if rank else sys.exit(0)
sys.exit(85 if "stop" in ending else int(ending.split()[-1]))
"""


@dataclass(frozen=True)
class Probe:
    """Submit probe jobs and read what they wrote."""

    cluster: Cluster
    folder: Path

    def submit(
        self, *options: str, endings: str, extra: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> str:
        """Queue a job of the probe; returns its id.

        Args:
            options: of sbatch.
            endings: how the attempts end, one after the other, with "/" between: an exit code; "stop": by 85, when
                asked to; "hang": never; "alone": on rank 0 alone; "killed": by SIGKILL of one rank; with "later" in
                front: once the file "now" is there; with "saved": after a checkpoint; with "said": after a line on
                standard output.
            extra: further arguments of pretrain.py.
            variables: of the environment.
        """
        environment = {**self.cluster.environment, "PLUMBLINE_ROOT": str(self.folder), **(variables or {})}
        arguments = ("--config", str(self.folder / "a file.yaml"), f"run.root={self.folder}/runs")
        job = (str(SLURM_FOLDER / "pretrain.sbatch"), *arguments, f"probe.endings={endings}", *extra)
        if not any("run.name" in word for word in extra):
            job += (f"run.name={uuid.uuid4().hex}",)
        cluster = replace(self.cluster, environment=environment)
        return cluster.run("sbatch", "--parsable", *options, *job, cwd=self.folder)

    def end(self, job_id: str) -> tuple[tuple[str, str, str], str]:
        """Wait until a job has ended; returns its state, exit code and restarts, and its log."""
        job = self.cluster.wait_end(job_id)
        return (job["JobState"], job["ExitCode"], job["Restarts"]), Path(job["StdOut"]).read_text()

    def wait_for_ranks(self, job_id: str, count: int = 2, attempt: int = 0) -> None:
        """Wait until all ranks of an attempt have begun."""
        files = [self.folder / f"job-{job_id}-attempt-{attempt}-rank-{rank}.json" for rank in range(count)]
        self.cluster.wait_for(job_id, lambda _: all(file.exists() for file in files))

    def found_by_ranks(self, job_id: str) -> list[dict[str, Any]]:
        """Return what each rank of the first attempt wrote down, in the order of ranks."""
        files = sorted(self.folder.glob(f"job-{job_id}-attempt-0-rank-*.json"))
        return [json.loads(file.read_text()) for file in files]


def install(cluster: Cluster, folder: Path) -> Probe:
    """Make a folder a checkout whose pretrain.py is the probe."""
    (folder / "launcher").mkdir()
    (folder / "launcher" / "pretrain.py").write_text(PROBE)
    (folder / "launcher" / "requeue.py").symlink_to(REPOSITORY / "launcher" / "requeue.py")
    (folder / "a file.yaml").write_text("run: {}")
    shutil.copytree(SLURM_FOLDER, folder / "slurm")
    return Probe(cluster, folder)


def decisions(log: str) -> list[str]:
    """Return what requeue.py decided after each attempt, without the name of the limit."""
    lines = [line.partition("requeue.py: ")[2] for line in log.splitlines() if line.startswith("requeue.py: ")]
    return [line.replace(" (PLUMBLINE_FRUITLESS_ATTEMPTS)", "") for line in lines]
