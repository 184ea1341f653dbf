"""Say how a run ends that met an error: by which exit code, and which nodes are to blame."""

import os
from contextlib import suppress
from pathlib import Path

from plumbline.data.damage import DamagedFileError
from plumbline.data.folders import UnlikeManifestError
from plumbline.launcher.runtime.checkpoint.newest import newest_checkpoint
from plumbline.launcher.runtime.checkpoint.store import CheckpointError, UnreadError, UnsavedError
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.doctor.start import UnfitError
from plumbline.launcher.runtime.run.lock import RunLockedError
from plumbline.launcher.runtime.system.attempts import AWAY, BROKEN_GPU, LACKING, UNFIT, WRONG, accuse
from plumbline.launcher.runtime.system.exit_codes import BROKEN, CORRUPT, CRASHED, UNREACHED, UNSAVED, UNUSABLE
from plumbline.launcher.runtime.system.faults import is_of_device, is_out_of_memory, out_of_memory
from plumbline.launcher.runtime.system.nodes import node_name, own_job
from plumbline.launcher.runtime.system.process_group import UnmetError
from plumbline.launcher.runtime.system.world import MissingGPUError
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
"""Errors whose sentence says what to do; others are bugs once training has begun, or have a code of their own."""
RAISED_ON_ALL_RANKS = (UnsavedError, TrainingError, UnfitError, RunLockedError, UnlikeManifestError)
"""Errors that every rank has, so that rank 0 alone need log them."""
MAY_PASS = (OSError, UnmetError, UnfitError, MissingGPUError)
"""Those that another attempt, on other nodes or a little later, may not meet."""
LESS_MEMORY = (
    "train.activation_checkpointing=auto or full, a smaller data.micro_batch_size and deepspeed.zero_stage=auto take "
    "less, and plan.py --devices says how much"
)


def code_of(error: Exception, folder: Path, step: int = 0) -> int:
    """Return the exit code of a run that ends by an error; CRASHED for a bug.

    Args:
        error: what ends it.
        folder: of the run.
        step: that it has come to in this attempt. A run that has a step, or a checkpoint, has worked before: what ends
            it now may pass, as may in a job of Slurm what may be the fault of a node. Slurm tries again as often as
            PLUMBLINE_FRUITLESS_ATTEMPTS lets it.
    """
    if isinstance(error, UnsavedError):
        return UNSAVED
    if isinstance(error, UnreadError) or (isinstance(error, RunLockedError) and error.passes):
        return UNREACHED
    if isinstance(error, WrongNodeError) or is_of_device(error):
        return CORRUPT
    if isinstance(error, TrainingError):
        return BROKEN
    lacks_memory = is_out_of_memory(error)
    may_pass = (lacks_memory or isinstance(error, MAY_PASS)) and (step or _has_checkpoint(folder))
    if may_pass or (own_job() is not None and _may_be_of_a_node(error)):
        return UNREACHED
    return UNUSABLE if lacks_memory or isinstance(error, EXPLAINED) else CRASHED


def user_facing(error: Exception) -> Exception:
    """Return an error that says which node it was and what to do, where that of torch or CUDA does not."""
    if is_out_of_memory(error):
        return out_of_memory(error, node_name(), LESS_MEMORY)
    if not is_of_device(error):
        return error
    return RuntimeError(
        f"the GPU of this rank on {node_name()} cannot be used ({str(error).splitlines()[0]}): look at nvidia-smi "
        "there, then start the same command again; a job under Slurm starts it by itself, without the node"
    )


def accuse_nodes(error: Exception, folder: Path) -> None:
    """Note, within a Slurm job, the nodes that an error speaks against, for the next attempt to leave out."""
    if own_job() is None:
        return
    by_main = os.environ.get("RANK", "0") == "0"
    with suppress(OSError):  # then the next attempt finds out
        match error:
            case UnfitError() if by_main:  # all ranks have it
                accuse(folder / "slurm", error.nodes, UNFIT)
            case WrongNodeError() if by_main:
                accuse(folder / "slurm", error.nodes, WRONG)
            case MissingGPUError():
                accuse(folder / "slurm", [node_name()], LACKING)
            case _ if is_of_device(error):
                accuse(folder / "slurm", [node_name()], BROKEN_GPU)


def _may_be_of_a_node(error: Exception) -> bool:
    """Return whether a job that has just begun may meet an error because of a node that it was given."""
    match error:
        case UnmetError() | MissingGPUError():  # ranks that do not meet may wait for one that has died
            return True
        case UnfitError():
            return bool(error.nodes)
        case OSError():
            return error.errno in AWAY
    return False


def _has_checkpoint(folder: Path) -> bool:
    try:
        return newest_checkpoint(folder) is not None
    except PermissionError:  # of somebody else's folder
        return False
    except OSError:  # the disk is away
        return True
