"""Find this process's place among all processes of the run.

`python`, `deepspeed`, `torchrun` and one-task-per-rank `srun` all start the same script; the environment tells which.
"""

import errno
import os
import random
import socket
from dataclasses import dataclass

import torch

from plumbline.launcher.runtime.system import nodes
from plumbline.launcher.runtime.system.before_torch import HIDDEN, NVIDIA, has_gpus, slurm_ranks
from plumbline.launcher.runtime.system.log import TRAINING


class MissingGPUError(ValueError):
    """Say that a process does not see a GPU that it should have: as it was started, or because a node has lost it."""


@dataclass(frozen=True)
class World:
    """Identify this process among all processes of the run."""

    rank: int
    local_rank: int
    """Number among the ranks of its host, which need not be that of its device."""
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes files and prints."""
        return self.rank == 0


def _adopt_slurm_environment() -> None:
    """Give torch.distributed the five variables that it expects, under a bare `srun`."""
    env, ranks = os.environ, slurm_ranks(os.environ)
    if not ranks:
        return
    env.update(ranks)  # ahead of the check: an error names the rank that it is of
    if _number("WORLD_SIZE") > 1 and "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _address_of_first_task()
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    # One port for each attempt of a job, as in slurm/pretrain.sbatch; below the ports of outgoing connections
    attempt = int(env["SLURM_JOB_ID"]) + 1009 * int(env.get("SLURM_RESTART_COUNT", "0"))
    env.setdefault("MASTER_PORT", str(20000 + attempt % 12768))


def _number(name: str) -> int:
    """Return a variable of the environment as a number.

    Raises:
        ValueError: it is none; names it.
    """
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise ValueError(
            f"{name} = {os.environ[name]!r}: expected a number; start with deepspeed, torchrun or srun, or unset it"
        ) from error


def _address_of_first_task() -> str:
    """Return the address of the node that the first task of this Slurm step is on."""
    names = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        return nodes.first_address(names)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(
            "MASTER_ADDR: not set, and several srun tasks need one address to meet at, for which Slurm cannot be asked "
            f"here ({error}); submit slurm/pretrain.sbatch, or in a job "
            'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
        ) from error


def free_port() -> int:
    """Return a TCP port that nobody has, below those that Linux gives to whoever connects in the meantime.

    Raises:
        OSError: there is none.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):  # no seed decides: two may start at once
        try:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    raise OSError(errno.EADDRINUSE, "no port between 20000 and 32000 is free")


def emulates_bf16() -> bool:
    """Return whether the model would run on a processor that computes in bf16 at a small part of its speed in fp32."""
    return not torch.cuda.is_available() and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def be_alone() -> None:
    """Make this process a world of one, as plain `python` is."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


def read_world() -> World:
    """Return rank, world size and device as whichever launcher started this process gives them.

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
    rank, local_rank, size = (_number(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if size < 1 or not 0 <= rank < size or local_rank < 0 or not 0 < _number("MASTER_PORT") < 2**16:
        given = ", ".join(
            f"{name} = {os.environ[name]}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
        )
        raise ValueError(
            f"{given}: ranks count from 0 to WORLD_SIZE - 1, and a port is 1 to 65535; start with deepspeed, torchrun "
            "or srun, or unset them to run one process"
        )
    device = _device(rank, local_rank, size)
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)  # by which DeepSpeed chooses the device, in three places
    return World(rank, local_rank, size, device)


def _device(rank: int, local_rank: int, size: int) -> torch.device:
    """Return the GPU of this process, or the CPU where no GPU is visible.

    Raises:
        ValueError: the environment asks DeepSpeed for another kind of device.
        MissingGPUError: no visible GPU is left for this rank, or torch sees none where there are some.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not visible and os.environ.get("DS_ACCELERATOR") != "cpu":
        _miss_gpus(local_rank, size)
    kind = "cuda" if visible else "cpu"
    asked = os.environ.get("DS_ACCELERATOR", kind)
    if asked != kind:
        raise ValueError(
            f"DS_ACCELERATOR = {asked}, and this host shows {visible} GPU(s): unset it (to train on the CPU of a host "
            'with GPUs, hide them: CUDA_VISIBLE_DEVICES="")'
        )
    if not visible:
        return torch.device("cpu")
    # Slurm can show each task only its own GPU, which is then number 0 whatever the local rank
    is_task = "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_PROCID") == str(rank)
    index = 0 if visible == 1 and is_task else local_rank
    if index >= visible:
        raise MissingGPUError(
            f"LOCAL_RANK = {local_rank}: this node shows {visible} GPU(s); start one process for each"
        )
    return torch.device("cuda", index)


def _miss_gpus(local_rank: int, size: int) -> None:
    """Refuse to train on CPUs where GPUs are meant, and say that a host has some where that is not known.

    Raises:
        MissingGPUError: Slurm gave the job GPUs, or the host of one of several ranks has some, for which this torch is
            made: the other ranks would wait for this one on theirs. Nobody has hidden them.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return
    promised = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    why = (
        f"torch {torch.__version__} sees no GPU on {socket.gethostname()}: look at nvidia-smi there, and at "
        'torch.version.cuda, which is None for a build without GPUs; CUDA_VISIBLE_DEVICES="" trains on its CPUs'
    )
    if promised not in ("", "0"):
        raise MissingGPUError(f"SLURM_GPUS_ON_NODE = {promised}, but {why}")
    if not has_gpus() or "SLURM_JOB_ID" in os.environ:  # a job may have asked for CPUs alone
        return
    if size > 1 and torch.version.cuda is not None and has_gpus(files=(NVIDIA,)):
        raise MissingGPUError(f"this host has GPUs, but {why}")
    if local_rank == 0:
        TRAINING.warning(f"this host has GPUs, but {why} without this line")
