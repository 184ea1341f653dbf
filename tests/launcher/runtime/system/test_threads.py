"""A rank takes its share of the host's cores for work on the host, unless the user has said how many threads."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from plumbline.launcher.runtime.system import threads
from plumbline.launcher.runtime.system.threads import _quota, host_threads

SOURCES = Path(__file__).resolve().parents[4] / "launcher"  # where a script finds `plumbline`
BY_LAUNCHERS = (
    *("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"),
)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BY_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(48)))
    monkeypatch.setattr(threads, "_quota", lambda _groups: float("inf"))


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 48),
        ({"LOCAL_WORLD_SIZE": "8"}, 6),
        ({"LOCAL_SIZE": "8"}, 6),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 12),
        ({"SLURM_STEP_TASKS_PER_NODE": "16"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NTASKS_PER_NODE": "8"}, 12),
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "10"}, 10),
        ({"SLURM_NTASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "96"}, 48),
        ({"SLURM_CPUS_PER_TASK": "48", "LOCAL_SIZE": "8"}, 6),
        ({"LOCAL_WORLD_SIZE": "100"}, 1),
        ({"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "8"}, None),
        ({"OMP_NUM_THREADS": "1", "LOCAL_SIZE": "8"}, None),
        ({"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}, None),
    ],
)
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], expected: int | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert host_threads() == expected


@pytest.mark.parametrize(("user", "expected"), [({}, "2"), ({"OMP_NUM_THREADS": "1"}, "None")])
def test_torchruns_own_default_is_no_choice_of_the_user(tmp_path: Path, user: Mapping[str, str], expected: str) -> None:
    """The 1 that torchrun sets looks the same to a rank as the user's; torchrun's own start tells them apart."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os; os.sched_getaffinity = lambda _pid: set(range(4))\n"
        "from plumbline.launcher.runtime.system import threads\n"
        "from plumbline.launcher.runtime.system.threads import host_threads\n"
        "threads._quota = lambda _groups: 4\n"
        "assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        "open(__file__ + os.environ['RANK'], 'w').write(str(host_threads()))\n"
    )
    kept = {key: value for key, value in os.environ.items() if key not in BY_LAUNCHERS}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(torchrun, env={**kept, "PYTHONPATH": str(SOURCES), **user}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [Path(f"{script}{rank}").read_text() for rank in (0, 1)] == [expected] * 2


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, float("inf")),
        ({"job/task": "max 100000"}, float("inf")),
        ({"job/task": "250000 100000"}, 2.5),
        ({"": "100000 50000", "job": "400000 100000", "job/task": "max 100000"}, 2.0),
        ({"other": "100000 100000"}, float("inf")),
    ],
    ids=["none", "unlimited", "own", "the least of those above", "somebody else's"],
)
def test_a_quota_counts_as_cores(tmp_path: Path, limits: Mapping[str, str], cores: float) -> None:
    for group, limit in limits.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(f"{limit}\n")
    assert _quota("1:name=systemd:/elsewhere\n0::/job/task\n", tmp_path) == cores


@pytest.mark.usefixtures("cores")
def test_a_container_of_few_cores_has_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_quota", lambda _groups: 2.5)
    assert host_threads() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_threads() == 1


def test_threads_of_other_commands_sleep_as_well() -> None:
    script = (
        "import os, sys; from plumbline.launcher.runtime.commands import cli; cli.begin(lambda: None); "
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in threads.WAITING}
    words = [sys.executable, "-c", script]
    told = subprocess.run(words, cwd=SOURCES, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == "PASSIVE False\n"
