"""Find this process's place among all processes of the run.

`python`, `deepspeed`, `torchrun` and one-task-per-rank `srun` all start the same script; the environment shows which.
"""

import errno
import os
import random
import socket
from dataclasses import dataclass

import torch

from plumbline.launcher.runtime.cluster import nodes
from plumbline.launcher.runtime.system.before_torch import HIDDEN, NVIDIA, has_gpus, slurm_ranks
from plumbline.launcher.runtime.system.log import TRAINING


class MissingGPUError(ValueError):
    """Signal that a process lacks a GPU, because of how it was started or because the node has lost it."""


@dataclass(frozen=True)
class World:
    """Identify this process among all processes of the run."""

    rank: int
    local_rank: int
    """Index among the ranks of its host, which may differ from its device's."""
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes files and prints."""
        return self.rank == 0


def _adopt_slurm_environment() -> None:
    """Set the five variables that torch.distributed expects, under a bare `srun`."""
    env, ranks = os.environ, slurm_ranks(os.environ)
    if not ranks:
        return
    env.update(ranks)  # before the check, so that its error names the rank
    if _number("WORLD_SIZE") > 1 and "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _address_of_first_task()
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    # A port per attempt of a job, as in slurm/pretrain.sbatch, below the ports of outgoing connections; and per step,
    # since a person may start several at once on the nodes of one allocation
    attempt = _number("SLURM_JOB_ID") + 1009 * (_number("SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in env else 0)
    env.setdefault("MASTER_PORT", str(20000 + (attempt + 101 * _number("SLURM_STEP_ID")) % 12768))


def _number(name: str) -> int:
    """Return an environment variable as a number.

    Raises:
        ValueError: it is missing or not a number; names the variable.
    """
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(
            f"{name} = {text!r}: expected a number; start with deepspeed, torchrun or srun, or unset it"
        ) from error


def _address_of_first_task() -> str:
    """Return the address of the node of this Slurm step's first task."""
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
    """Return a free TCP port, below those that Linux assigns to outgoing connections.

    Raises:
        OSError: there is none.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):  # unseeded: two may start at once
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
    """Return whether the model would run on a processor whose bf16 is much slower than its fp32."""
    return not torch.cuda.is_available() and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def be_alone() -> None:
    """Make this process a world of one rank, as under plain `python`."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


def read_world() -> World:
    """Return rank, world size and device from the launcher that started this process.

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
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed chooses the device by it, in three places
    return World(rank, local_rank, size, device)


def _device(rank: int, local_rank: int, size: int) -> torch.device:
    """Return the GPU of this process, or the CPU if no GPU is visible.

    Raises:
        ValueError: the environment asks DeepSpeed for another kind of device.
        MissingGPUError: no visible GPU is left for this rank, or torch does not see the host's GPUs.
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
    # Slurm may show each task only its own GPU, which then has number 0 for any local rank
    is_task = "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_PROCID") == str(rank)
    index = 0 if visible == 1 and is_task else local_rank
    if index >= visible:
        raise MissingGPUError(
            f"LOCAL_RANK = {local_rank}: this node shows {visible} GPU(s); start one process for each"
        )
    return torch.device("cuda", index)


def _miss_gpus(local_rank: int, size: int) -> None:
    """Refuse to train on CPUs if GPUs were meant, and warn if a host has GPUs but this is uncertain.

    Raises:
        MissingGPUError: Slurm gave the job GPUs, or this is one of several ranks and its host has GPUs, which are not
            hidden and which this torch supports: the other ranks would wait for this one on their GPUs.
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
    if not has_gpus() or "SLURM_JOB_ID" in os.environ:  # a job may have requested only CPUs
        return
    if size > 1 and torch.version.cuda is not None and has_gpus(files=(NVIDIA,)):
        raise MissingGPUError(f"this host has GPUs, but {why}")
    if local_rank == 0:
        TRAINING.warning(f"this host has GPUs, but {why} without this line")
