"""A real Slurm cluster of two nodes on this machine, started for the test session and gone after it.

munged, slurmctld and a slurmd for each node (n1, n2, ..., all at 127.0.0.1) run with their own key, sockets, ports and
state in a temporary folder, as whoever runs the tests, so nothing of an installed Slurm is touched and several test
sessions can run side by side. Everything a job starts inherits SLURM_CONF, which is unique to the cluster: that is
how the end of the session finds what a job may have left behind.
"""

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.conftest import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

SLURM_CONF = """\
ClusterName=plumbline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A requeued job starts once its old credentials have expired; 5 seconds is the least Slurm accepts (default 120).
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
# Both nodes are this machine: let each claim more cores than it has, and track processes without cgroups.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# A line for each attempt of a job, requeued ones included
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
KillWait=2
# A test may ask about a job that ended long ago
MinJobAge=3600
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

CONFIG = """\
run: {{name: tiny, root: {root}}}
model: {{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, head_dim: 32}}
parameterization: {{base_hidden_size: 64, base_num_hidden_layers: 2}}
data: {{train: [{{path: {corpus}}}], sequence_length: 128, global_batch_size: 16, micro_batch_size: 8}}
optimizer: {{lr: 4.0e-3}}
schedule: {{warmup: 10 steps}}
train: {{steps: 100, eval_batches: 4}}
deepspeed: {{precision: fp32}}
"""


@dataclass(frozen=True)
class Cluster:
    """Hold a running cluster: `environment` makes every Slurm command talk to it and to nothing else."""

    folder: Path
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Name -> process; those of nodes have the names of the nodes."""

    def start(self, name: str, *command: str) -> None:
        """Start a daemon; its output goes to the cluster's folder."""
        # pdeathsig: not even a pytest that is killed leaves daemons behind
        command = ("setpriv", "--pdeathsig=TERM", *command)
        with (self.folder / f"{name}.out").open("a") as output:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self.start(node, "slurmd", "-D", "-N", node)

    def fail_node(self, node: str) -> None:
        """Kill the daemon of a node, its step daemons and the tasks on it: Slurm hears nothing more of it."""
        victims = [psutil.Process(self.daemons[node].pid)]
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                victims += [parent for parent in process.parents() if parent.name() == "slurmstepd"] + [process]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        self.daemons[node].wait()

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Return what runs in jobs on a node; without one, everything that was started to talk to this cluster."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                its = process.environ()
                ours = its.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if ours and node in (None, its.get("SLURMD_NODENAME")):
                    found.append(process)
        return found

    def ranks(self, node: str | None = None) -> list[psutil.Process]:
        """Return the ranks of pretraining that run on a node, or on all."""
        found = []
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("python") and any("pretrain.py" in word for word in process.cmdline()):
                    found.append(process)
        return found

    def run(self, *command: str | Path, cwd: Path = REPOSITORY, check: bool = True) -> str:
        """Run a command against this cluster and return its standard output."""
        done = subprocess.run(command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(map(str, command))} exited {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def submit(self, config: Path, *more: str) -> list[str]:
        """Submit a run of two nodes, a rank on each, by launcher/submit.py, and return the ids of its jobs."""
        command = (self.environment["PLUMBLINE_PYTHON"], REPOSITORY / "launcher" / "submit.py", "--json")
        facts = json.loads(self.run(*command, "--config", config, "--nodes", "2", "--tasks-per-node", "1", *more))
        return [str(job_id) for job_id in facts["jobs"]]

    def job(self, job_id: str, check: bool = True) -> dict[str, str]:
        """Return what `scontrol show job` knows: JobState, ExitCode, Restarts, ...; without `check` perhaps nothing."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id, check=check).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job_id: str, condition: Callable[[dict[str, str]], object]) -> dict[str, str]:
        """Poll a job until `condition(its fields)`; out of patience, fail with its fields and its log."""
        deadline = time.monotonic() + PATIENCE
        while True:
            job = self.job(job_id, check=False)  # a busy machine's controller may not answer in time
            if job and condition(job):
                return job
            if time.monotonic() > deadline:
                job = self.job(job_id)
                log = Path(job["StdOut"])
                text = log.read_text(errors="replace") if log.exists() else "(no log)"
                raise AssertionError(f"job {job_id} is {job['JobState']} ({job['Reason']}) after {PATIENCE} s\n{text}")
            time.sleep(0.2)

    def wait_end(self, job_id: str) -> dict[str, str]:
        """Wait until the job has ended for good (not: requeued), and return its fields."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return self.wait_for(job_id, lambda job: job["JobState"] in ended)


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> Path:
    """Return a model of two narrow layers that trains for a few seconds; run folders go beside the file."""
    file = tmp_path / "tiny.yaml"
    file.write_text(CONFIG.format(root=tmp_path / "runs", corpus=corpus))
    return file


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Yield a cluster of two idle nodes and no jobs."""
    missing = [name for name in DAEMONS if shutil.which(name, path=_search_path()) is None]
    if missing:
        message = f"Slurm is not installed ({', '.join(missing)} not found): apt-get install slurm-wlm munge"
        give_up = pytest.fail if os.environ.get("PLUMBLINE_REQUIRE_SLURM") == "1" else pytest.skip
        give_up(message)
    with cluster_of("n1", "n2") as started:
        yield started


@contextlib.contextmanager
def cluster_of(*nodes: str) -> Iterator[Cluster]:
    """Yield a cluster of idle nodes, eight CPUs and two (imaginary) GPUs each, while the context lasts."""
    # Not pytest's tmp_path: a socket's path must be shorter than 108 characters.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as name,
        _port_block(1 + len(nodes)) as port,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        started = Cluster(folder, _configure(folder, port, nodes))
        stack.callback(_kill_leftovers, started.environment["SLURM_CONF"])
        stack.callback(_stop, started.daemons)
        _start_daemons(started, nodes)
        yield started
        started.run("scancel", "--user", getpass.getuser(), check=False)
        _wait(lambda: not started.run("squeue", "--noheader"), "the last jobs did not end", folder)


def _search_path() -> str:
    # Daemons live in sbin, which is not on an ordinary user's PATH.
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


@contextlib.contextmanager
def _port_block(count: int) -> Iterator[int]:
    """Yield the first of `count` ports that are ours while the context lasts.

    Another, held open, is the claim that keeps another test session away from the block. The ports lie below the
    range the kernel hands to outgoing connections, or one of those could take a port before its daemon does.
    """
    for first in range(17000, 19000, 1 + count):
        with contextlib.ExitStack() as claims:
            try:
                held = [claims.enter_context(socket.create_server(("127.0.0.1", first + i))) for i in range(1 + count)]
            except OSError:
                continue
            for ours in held[1:]:
                ours.close()
            yield first + 1
            return
    raise RuntimeError("no free block of ports between 17000 and 19000")


def _configure(folder: Path, port: int, names: Sequence[str]) -> dict[str, str]:
    """Write the cluster's configuration; returns the environment its daemons and clients run in."""
    folder.chmod(0o755)  # munge insists on folders that others may search but not write
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + 1 + i} CPUs=8 Gres=gpu:2 Weight={1 + i}"
        for i, name in enumerate(names)  # by weight, the first nodes are taken first
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(
        SLURM_CONF.format(host=host, controller_port=port, user=getpass.getuser(), folder=folder, nodes=nodes)
    )
    # Two devices that exist everywhere stand in for GPUs: Slurm counts and assigns them, nothing opens them.
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    ours = ("SLURM", "SBATCH", "PLUMBLINE", "OMP")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return {
        **kept,
        "PATH": _search_path(),
        "SLURM_CONF": str(configuration),
        "PLUMBLINE_ROOT": str(REPOSITORY),
        "PLUMBLINE_PYTHON": sys.executable,
    }


def _start_daemons(cluster: Cluster, nodes: Sequence[str]) -> None:
    """Start munged, the controller and the nodes, and wait until the nodes are idle."""
    folder = cluster.folder
    munge_files = [f"--{option}={folder}/munge.{ending}" for option, ending in MUNGE_FILES.items()]
    cluster.start("munged", "munged", "--foreground", *munge_files)
    _wait((folder / "munge.socket").exists, "munged did not start", folder)
    cluster.start("slurmctld", "slurmctld", "-D", "-c")
    for node in nodes:
        cluster.start_node(node)
    idle = ["idle"] * len(nodes)
    query = ("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T")
    _wait(lambda: cluster.run(*query, check=False).split() == idle, "the nodes did not become idle", folder)


MUNGE_FILES = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}


def _stop(daemons: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Stop what was started, the last first."""
    for daemon in reversed([*daemons.values()]):
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _kill_leftovers(configuration: str) -> None:
    """Kill every process that has this cluster's SLURM_CONF: step daemons and tasks that outlived their job."""
    leftovers = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get("SLURM_CONF") == configuration:
                leftovers.append(process)
                process.kill()
    psutil.wait_procs(leftovers, timeout=10)


def _wait(condition: Callable[[], object], failure: str, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.out")))
            raise RuntimeError(f"{failure} within {PATIENCE} s\n{logs}")
        time.sleep(0.1)
