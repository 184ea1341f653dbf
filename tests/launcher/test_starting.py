"""What `pretrain.py` says before it imports anything slow, and by whom: a stand-in for torch ends it at its import."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from plumbline.launcher.runtime.system.exit_codes import UNREACHED, UNUSABLE
from tests.conftest import PATIENCE, REPOSITORY, environment

TORCH = "import os, sys\nprint(f\"torch: threads {os.environ['OMP_WAIT_POLICY']}\", flush=True)\nos._exit(7)\n"
STEP = {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "3"}

UNREADABLE = Path("/proc/self/mem")
"""A file at whose start Linux reads nothing but an I/O error, as a network disk does that is away."""


@pytest.fixture
def torchless(tmp_path: Path) -> Path:
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "torch.py").write_text(TORCH, encoding="utf-8")
    return tmp_path / "stand_in"


def begin(torchless: Path, config: Path, variables: Mapping[str, str], *overrides: str) -> tuple[int, str, str]:
    """Return exit code and output of `pretrain.py` until it imports torch."""
    script = REPOSITORY / "launcher" / "pretrain.py"
    words = [sys.executable, str(script), "--config", str(config), *overrides]
    whole = environment({"PYTHONPATH": str(torchless), **variables})
    done = subprocess.run(words, env=whole, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, "starting: 1 rank of 1 thread"),
        ({"OMP_NUM_THREADS": "3"}, "starting: 1 rank of 3 threads"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "starting: 2 ranks of 1 thread each"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({**STEP, "SLURM_PROCID": "0"}, "starting: 3 ranks of 1 thread each"),
        ({**STEP, "SLURM_PROCID": "2"}, None),
        ({**STEP, "SLURM_PROCID": "2", "RANK": "0", "WORLD_SIZE": "8"}, "starting: 8 ranks of 1 thread each"),
    ],
    ids=["alone", "threads", "rank 0", "rank 1", "srun", "srun, rank 2", "launcher under srun"],
)
def test_rank_0_says_what_starts_ahead_of_slow_imports(
    torchless: Path, tiny_config: Path, variables: Mapping[str, str], line: str | None
) -> None:
    code, told, errors = begin(torchless, tiny_config, variables)
    assert (code, errors) == (7, "")
    assert told.splitlines() == [*([line] if line else []), "torch: threads PASSIVE"]


def test_how_threads_wait_is_the_users_choice(torchless: Path, tiny_config: Path) -> None:
    assert "torch: threads ACTIVE\n" in begin(torchless, tiny_config, {"OMP_WAIT_POLICY": "ACTIVE"})[1]


@pytest.mark.parametrize("variables", [{}, {**STEP, "SLURM_PROCID": "2"}], ids=["alone", "srun, rank 2"])
def test_what_cannot_be_read_is_told_ahead_of_slow_imports(torchless: Path, variables: Mapping[str, str]) -> None:
    code, told, errors = begin(torchless, Path("no/file.yaml"), variables)
    assert (code, told) == (2, "")
    where = " on rank 2" if variables else ""
    assert errors == f"error{where}: no/file.yaml: no such file; there is no folder no\n"


def test_an_override_without_a_value_is_told_ahead_of_slow_imports(torchless: Path, tiny_config: Path) -> None:
    code, _, errors = begin(torchless, tiny_config, {}, "optimizer.lr")
    assert code == 2
    assert errors.startswith("error: 'optimizer.lr': an override is section.key=value")


@pytest.mark.parametrize(("variables", "expected"), [({}, UNUSABLE), ({"SLURM_JOB_ID": "7"}, UNREACHED)])
def test_a_disk_that_cannot_read_the_configuration_does_not_end_a_job_for_good(
    torchless: Path, variables: Mapping[str, str], expected: int
) -> None:
    code, _, errors = begin(torchless, UNREADABLE, variables)
    assert (code, errors) == (expected, f"error: [Errno 5] Input/output error: '{UNREADABLE}'\n")
