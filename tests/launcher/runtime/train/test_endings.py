"""By which code a run ends that met an error, and which nodes are to blame: what may pass is tried again."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
import torch
from torch import OutOfMemoryError

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.checkpoint.store import MANIFEST, CheckpointError, UnreadError, UnsavedError
from plumbline.launcher.runtime.cluster.attempts import BROKEN_GPU, LACKING, UNFIT, WRONG, accused
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.doctor.start import UnfitError
from plumbline.launcher.runtime.ranks.process_group import UnmetError
from plumbline.launcher.runtime.ranks.world import MissingGPUError
from plumbline.launcher.runtime.run.lock import RunLockedError
from plumbline.launcher.runtime.system.exit_codes import BROKEN, CORRUPT, CRASHED, UNREACHED, UNSAVED, UNUSABLE
from plumbline.launcher.runtime.train.endings import accuse_nodes, code_of, user_facing
from plumbline.launcher.runtime.train.guards.guard import TrainingError, WrongNodeError

if TYPE_CHECKING:
    from pathlib import Path

ECC = RuntimeError("CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable' in ...")
GONE = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]")
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 77.80 GiB memory in use. Of the allocated memory ..."
)


@pytest.mark.parametrize(
    ("error", "first", "later"),
    [
        (ConfigError("train.steps = 0"), UNUSABLE, UNUSABLE),
        (CheckpointError("of another model"), UNUSABLE, UNUSABLE),
        (DamagedFileError("train.bin"), UNUSABLE, UNUSABLE),
        (RunLockedError("is being trained"), UNUSABLE, UNUSABLE),
        (RunLockedError("is being trained by an earlier attempt", passes=True), UNREACHED, UNREACHED),
        (OSError("Stale file handle"), UNUSABLE, UNREACHED),
        (UnmetError("the ranks cannot meet"), UNUSABLE, UNREACHED),
        (MissingGPUError("no GPU"), UNUSABLE, UNREACHED),
        (UnfitError("n1: another Python", ["n1"]), UNUSABLE, UNREACHED),
        (UnsavedError("full"), UNSAVED, UNSAVED),
        (UnreadError("away"), UNREACHED, UNREACHED),
        (WrongNodeError("other bits.", ["n1"]), CORRUPT, CORRUPT),
        (TrainingError("not finite"), BROKEN, BROKEN),
        (ECC, CORRUPT, CORRUPT),
        (OutOfMemoryError(FULL), UNUSABLE, UNREACHED),
        (GONE, CRASHED, CRASHED),
        (RuntimeError("CUDA error: out of memory"), UNUSABLE, UNREACHED),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), CRASHED, CRASHED),
        (ValueError("a bug"), CRASHED, CRASHED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_may_pass_is_tried_again_by_a_run_that_has_worked(
    tmp_path: Path, error: Exception, first: int, later: int
) -> None:
    assert code_of(error, tmp_path) == first
    assert code_of(error, tmp_path, step=3) == later
    checkpoint = tmp_path / "checkpoints" / "step_00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).touch()
    assert code_of(error, tmp_path) == later


@pytest.mark.parametrize(
    ("error", "code"),
    [
        # Rank 0 says so, and its word would end the job where the code of a rank that died would not
        (UnmetError("the ranks cannot form a group"), UNREACHED),
        (MissingGPUError("no GPU"), UNREACHED),
        (UnfitError("n1: another Python", ["n1"]), UNREACHED),
        (UnfitError("all: 1 GB free, one checkpoint takes 9 GB", []), UNUSABLE),
        (OSError(errno.ESTALE, "Stale file handle"), UNREACHED),
        (OSError(errno.ENOENT, "No such file or directory"), UNUSABLE),
        (ConfigError("train.steps = 0"), UNUSABLE),
        (OutOfMemoryError(FULL), UNUSABLE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_a_job_tries_again_where_a_node_may_be_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    """Of a run that is yet to make its first step: outside of a job a person looks on."""
    assert code_of(error, tmp_path) == UNUSABLE
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert code_of(error, tmp_path) == code


@pytest.mark.parametrize(
    ("says", "code"), [(OSError(5, "Input/output error"), UNREACHED), (PermissionError(13, "not yours"), UNUSABLE)]
)
def test_a_disk_that_is_away_does_not_say_whether_there_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: OSError, code: int
) -> None:
    def look(_folder: Path) -> None:
        raise says

    monkeypatch.setattr("plumbline.launcher.runtime.train.endings.newest_checkpoint", look)
    assert code_of(OSError("Stale file handle"), tmp_path) == code


@pytest.mark.parametrize(
    ("error", "nodes"),
    [
        (MissingGPUError("no GPU"), {"here": LACKING}),
        (ECC, {"here": BROKEN_GPU}),
        (UnfitError("n1: another Python", ["n1"]), {"n1": UNFIT}),
        (WrongNodeError("other bits.", ["n1", "n2"]), {"n1": WRONG, "n2": WRONG}),
        (OSError("Stale file handle"), {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_nodes_are_blamed_for_what_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, nodes: dict[str, str]
) -> None:
    folder = tmp_path / "new"
    accuse_nodes(error, folder)
    assert not folder.exists(), "nobody reads it outside of a job"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "here")
    accuse_nodes(error, folder)
    assert accused(folder / "slurm", ["n1", "n2", "n3", "n4", "here"]) == nodes


def test_what_cuda_says_of_a_broken_gpu_is_told_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n4")
    told = str(user_facing(ECC))
    assert "the GPU of this rank on n4 cannot be used (CUDA error: uncorrectable ECC error encountered): look" in told
    other = OSError("Stale file handle")
    assert user_facing(other) is other


def test_what_takes_less_memory_is_told_where_there_is_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n4")
    assert "exchanging numbers (Connection closed by peer [127.0.0.1]): its last words, or" in str(user_facing(GONE))
    told = str(user_facing(OutOfMemoryError(FULL)))
    assert "no memory is left on n4 (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total" in told
    assert "of which 1.25 GiB is free): train.activation_checkpointing=auto or full, a smaller data.micro_b" in told
    assert told.endswith("nvidia-smi shows what other processes have")
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    told = str(user_facing(refused.value))
    assert "no memory is left on n4 ([enforce fail at" in told
    assert told.endswith("says how much")
