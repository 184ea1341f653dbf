"""Ranks: who am I, how do we meet, and the three small collectives that the training loop needs.

`python`, `deepspeed`, `torchrun` and one-task-per-rank `srun` all start the same script; the environment tells which.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process among all processes of the run."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0


def _adopt_slurm_environment() -> None:
    """Under a bare `srun`, give torch.distributed the five variables that it expects."""
    env = os.environ
    if "RANK" in env or "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return
    if int(env.get("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"])) > 1 and "MASTER_ADDR" not in env:
        raise ValueError(
            "MASTER_ADDR: not set, and several srun tasks need one address to meet at; submit slurm/pretrain.sbatch "
            'or export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
        )
    env["RANK"], env["LOCAL_RANK"] = env["SLURM_PROCID"], env["SLURM_LOCALID"]
    env["WORLD_SIZE"] = env.get("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"])
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    # One port for each job, so that jobs that share a node do not meet each other; below those of outgoing connections
    env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 12768))


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def be_alone() -> None:
    """Make this process a world of one, as plain `python` is."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


def read_world() -> World:
    """Rank, world size and device from whichever launcher started this process.

    Raises:
        ValueError: the launcher's variables are incomplete or contradict the visible GPUs.
    """
    _adopt_slurm_environment()
    if "RANK" not in os.environ:
        be_alone()
    missing = [
        name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not set although RANK is; start with deepspeed, torchrun or srun")
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if not torch.cuda.is_available():
        return World(rank, local_rank, size, torch.device("cpu"))
    # Slurm can show each task only its own GPU, which is then number 0 whatever the local rank
    index = 0 if torch.cuda.device_count() == 1 and "SLURM_STEP_ID" in os.environ else local_rank
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK = {local_rank}: this node shows {torch.cuda.device_count()} GPU(s); start one process for each"
        )
    return World(rank, local_rank, size, torch.device("cuda", index))


def start(world: World, timeout_minutes: float) -> None:
    """Join the process group (NCCL on GPUs, gloo on CPUs).

    Raises:
        ValueError: there is no C++ compiler for DeepSpeed's start-up operator, or the port is taken.
    """
    with quiet_stdout():
        if world.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
            if "OMP_NUM_THREADS" not in os.environ:  # the ranks of this host share its cores evenly
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // _ranks_on_this_host()))
            # The first call of a thread into MKL (exp, cos, ...) can round differently from all later ones
            # (seen with torch 2.13, two threads): make it here, or the first step after a resume may differ in a bit
            torch.ones(2**20).exp()
            _compile_start_up_operator()
        else:
            torch.cuda.set_device(world.device)
        import deepspeed  # after DS_ACCELERATOR is set: DeepSpeed reads it when it is imported

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # DeepSpeed calls collectives by names that the newest torch renames; nothing that a user could act on
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        try:
            deepspeed.init_distributed(
                dist_backend="nccl" if world.device.type == "cuda" else "gloo",
                auto_mpi_discovery=False,
                verbose=False,
                timeout=timedelta(minutes=timeout_minutes),
            )
        except dist.DistNetworkError as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ValueError(
                f"{address} (MASTER_ADDR:MASTER_PORT): the ranks cannot meet there; if another job has the port, give "
                f"the launcher another --master_port. {str(error).splitlines()[0]}"
            ) from error


def _ranks_on_this_host() -> int:
    """As each launcher tells it: torchrun, DeepSpeed, Slurm."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 1)


def _compile_start_up_operator() -> None:
    """Build the C++ operator that DeepSpeed compiles inside init_distributed on CPU, before anyone waits for anyone.

    torch's own lock for such builds is a plain file: killed in the middle, it makes every later process wait for ever,
    in silence. Here one process of a host builds at a time, under a lock that the kernel releases when its holder dies,
    so a lock file that is there while we hold ours is stale by construction. The folder is specific to host, torch,
    DeepSpeed and Python environment: objects are compiled for the processor they are built on, and two environments
    with one folder would build anew, for a minute, whenever they take turns.
    """
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise ValueError(
            f"C++ compiler {os.environ.get('CXX', 'c++')!r} not found: DeepSpeed compiles one operator when it starts "
            "on CPU; install g++ (Debian and Ubuntu: apt-get install g++) or point CXX at a compiler"
        )
    # ninja, which builds the operator, is beside the interpreter when the virtual environment is not activated
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    from deepspeed import __version__ as deepspeed_version
    from deepspeed.accelerator import get_accelerator

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "plumbline" / "torch_extensions"
    versions = re.sub(r"[^\w.-]", "_", f"{socket.gethostname()}-torch{torch.__version__}-deepspeed{deepspeed_version}")
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache / f"{versions}-{environment}")))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "plumbline.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in folder.glob("*/lock"):
            stale.unlink(missing_ok=True)
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None:
            builder.load(verbose=False)


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Keep the chatter of DeepSpeed and of compilers off standard output; errors still reach standard error."""
    sys.stdout.flush()
    saved = os.dup(1)
    with open(os.devnull, "w") as sink:  # noqa: PTH123 - a descriptor is wanted, not a path
        os.dup2(sink.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(saved, 1)
            os.close(saved)


def stop() -> None:
    """Leave the process group, all ranks together: a launcher may end the others soon after the first has left."""
    dist.barrier()
    dist.destroy_process_group()


def any_rank(flag: bool, world: World) -> bool:
    """Whether the flag is up on any rank: how all ranks agree on a step."""
    value = torch.tensor([int(flag)], dtype=torch.int32, device=world.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Element-wise sum over ranks, in place."""
    dist.all_reduce(value)
    return value


def gather_objects(value: Any, world: World) -> list[Any]:
    """Small Python objects of all ranks, in the order of ranks."""
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, value)
    return gathered
