"""Determine the exit code of a run that ends with an error, and the nodes to blame."""

import re
from contextlib import suppress
from pathlib import Path

from plumbline.data.damage import DamagedFileError
from plumbline.data.disk import AWAY
from plumbline.data.folders import UnlikeManifestError
from plumbline.launcher.runtime.checkpoint.newest import newest_checkpoint
from plumbline.launcher.runtime.checkpoint.store import CheckpointError, UnreadError, UnsavedError
from plumbline.launcher.runtime.cluster.attempts import BROKEN_GPU, LACKING, UNFIT, WRONG, accuse
from plumbline.launcher.runtime.cluster.nodes import node_name, own_job
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.doctor.start import UnfitError
from plumbline.launcher.runtime.ranks.process_group import UnmetError
from plumbline.launcher.runtime.ranks.world import MissingGPUError
from plumbline.launcher.runtime.run.lock import RunLockedError
from plumbline.launcher.runtime.system.exit_codes import BROKEN, CORRUPT, CRASHED, UNREACHED, UNSAVED, UNUSABLE
from plumbline.launcher.runtime.system.faults import is_of_device, is_of_lost_rank, is_out_of_memory, out_of_memory
from plumbline.launcher.runtime.system.log import own_rank
from plumbline.launcher.runtime.train.guards.guard import TrainingError, WrongNodeError

EXPLAINED = (
    ConfigError,
    CheckpointError,
    DamagedFileError,
    RunLockedError,
    UnfitError,
    UnmetError,
    MissingGPUError,
    OSError,
)
"""Errors whose message says what to do; once training has begun, others are bugs or have their own exit code."""
RAISED_ON_ALL_RANKS = (UnsavedError, TrainingError, UnfitError, RunLockedError, UnlikeManifestError)
"""Errors that every rank raises, so that only rank 0 needs to log them."""
MAY_PASS = (OSError, UnmetError, UnfitError, MissingGPUError)
"""Errors that may not recur in another attempt, on other nodes or a little later."""
LESS_MEMORY = (
    "train.activation_checkpointing=auto or full, a smaller data.micro_batch_size and deepspeed.zero_stage=auto take "
    "less, and plan.py --devices says how much"
)


def code_of(error: Exception, folder: Path, step: int = 0) -> int:
    """Return the exit code of a run that ends with an error, or CRASHED for a bug or a rank whose peer has ended.

    Such a rank does not know why. srun returns the highest code of all ranks, so it leaves that to the other's.
    A run that has completed a step or has a checkpoint has worked before, so its error may be temporary. In a Slurm
    job, the same holds for an error that may be caused by a node. After such an error a Slurm job is tried again, as
    often as PLUMBLINE_FRUITLESS_ATTEMPTS permits.

    Args:
        error: the error.
        folder: the run folder.
        step: number of completed steps of the run; 0 before training begins.
    """
    if isinstance(error, UnsavedError):
        return UNSAVED
    if isinstance(error, UnreadError) or (isinstance(error, RunLockedError) and error.passes):
        return UNREACHED
    if isinstance(error, WrongNodeError) or is_of_device(error):
        return CORRUPT
    if isinstance(error, TrainingError):
        return BROKEN
    if is_of_lost_rank(error):
        return CRASHED
    lacks_memory = is_out_of_memory(error)
    may_pass = (lacks_memory or isinstance(error, MAY_PASS)) and (step or _has_checkpoint(folder))
    if may_pass or (own_job() is not None and _may_be_of_a_node(error)):
        return UNREACHED
    return UNUSABLE if lacks_memory or isinstance(error, EXPLAINED) else CRASHED


def user_facing(error: Exception) -> Exception:
    """Return the error, or in place of one of torch, CUDA or gloo, one that names the node and the remedy."""
    if is_out_of_memory(error):
        return out_of_memory(error, node_name(), LESS_MEMORY)
    if is_of_lost_rank(error):
        said = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0].partition(". ")[0])  # but for a line of C++
        return RuntimeError(
            f"another rank has ended, with which this one on {node_name()} was exchanging numbers ({said}): its last "
            "words, or its exit code if it was killed, say why; start the same command again"
        )
    if not is_of_device(error):
        return error
    return RuntimeError(
        f"the GPU of this rank on {node_name()} cannot be used ({str(error).splitlines()[0]}): look at nvidia-smi "
        "there, then start the same command again; a job under Slurm starts it by itself, without the node"
    )


def accuse_nodes(error: Exception, folder: Path) -> None:
    """Record, within a Slurm job, the nodes that an error shows to be faulty, for the next attempt to exclude."""
    if own_job() is None:
        return
    by_main = own_rank() == "0"
    with suppress(OSError):  # then the next attempt finds the fault itself
        match error:
            case UnfitError() if by_main:  # all ranks raise it
                accuse(folder / "slurm", error.nodes, UNFIT)
            case WrongNodeError() if by_main:
                accuse(folder / "slurm", error.nodes, WRONG)
            case MissingGPUError():
                accuse(folder / "slurm", [node_name()], LACKING)
            case _ if is_of_device(error):
                accuse(folder / "slurm", [node_name()], BROKEN_GPU)


def _may_be_of_a_node(error: Exception) -> bool:
    """Return whether an error of a job that has just begun may be caused by one of its nodes."""
    match error:
        case UnmetError() | MissingGPUError():  # ranks that cannot connect may be waiting for one that has died
            return True
        case UnfitError():
            return bool(error.nodes)
        case OSError():
            return error.errno in AWAY
    return False


def _has_checkpoint(folder: Path) -> bool:
    try:
        return newest_checkpoint(folder) is not None
    except PermissionError:  # the folder belongs to another user
        return False
    except OSError as error:  # assume that there is one on a disk that is away, but not at a path that cannot be
        return error.errno in AWAY
