"""What slurm/job.sh and pretrain.sbatch hand to srun, as a made-up Slurm of other versions and sites sees it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.probe import REPOSITORY, SLURM_FOLDER

SRUN = "#!/bin/bash\nenv -0 > {folder}/handed\n"
OTHER_LAUNCHERS = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0",
    "CROSS_SIZE": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


@dataclass(frozen=True)
class Script:
    """Run job scripts of slurm/ with a Slurm that answers nothing."""

    folder: Path

    def run(self, name: str = "pretrain.sbatch", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a job script on node n7, with variables of the job or of the shell that it was submitted from."""
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PLUMBLINE_ROOT": str(REPOSITORY),
            "PLUMBLINE_PYTHON": str(self.folder / "python"),
            "SLURMD_NODENAME": "n7",
            "SLURM_JOB_ID": "50000",
            "SLURM_JOB_NODELIST": "n[7-8]",
            "SLURM_NTASKS": "2",
            **variables,
        }
        command = ("bash", SLURM_FOLDER / name, "--config", "a")
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def handed(self, **variables: str) -> dict[str, str]:
        """Return the environment that pretrain.sbatch hands to srun."""
        done = self.run(**variables)
        assert done.returncode == 0, done.stderr
        pairs = (self.folder / "handed").read_text().split("\0")
        return dict(pair.split("=", 1) for pair in pairs if pair)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    programs = {"srun": SRUN.format(folder=tmp_path), "python": "#!/bin/bash\necho 0\n", "squeue": "#!/bin/false\n"}
    for name, text in {**programs, "scontrol": "#!/bin/bash\n[[ $2 == hostnames ]] && echo n7\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return Script(tmp_path)


@pytest.mark.parametrize(
    ("tres", "cores"),
    [(None, "2"), ("cpu=6,gres/gpu=1", "6"), ("gres/gpu:1,cpu:6", "6"), ("gres/gpu=1", "2"), ("gres/xcpu=6", "2")],
)
def test_srun_is_told_one_number_of_cores(script: Script, tres: str | None, cores: str) -> None:
    """Slurm 23.11 and later have it twice, and their srun dies where the two differ."""
    told = {} if tres is None else {"SLURM_TRES_PER_TASK": tres}
    handed = script.handed(SLURM_CPUS_PER_TASK="2", **told)
    names = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "OMP_NUM_THREADS")
    assert [handed[name] for name in names] == [cores] * 3


def test_what_another_launcher_left_in_the_shell_reaches_no_rank(script: Script) -> None:
    handed = script.handed(**OTHER_LAUNCHERS, MASTER_PORT="29500")
    assert not OTHER_LAUNCHERS.keys() & handed.keys()
    assert handed["MASTER_PORT"] != "29500"


def test_each_attempt_meets_at_its_own_port_unless_one_is_exported(script: Script) -> None:
    ports = [int(script.handed(SLURM_RESTART_COUNT=str(restart))["MASTER_PORT"]) for restart in range(3)]
    assert len({*ports}) == 3
    assert all(20000 <= port < 32768 for port in ports)
    assert script.handed(MASTER_PORT="21000")["MASTER_PORT"] == "21000"


def test_ranks_meet_at_the_name_of_a_node_of_which_slurm_tells_nothing(script: Script) -> None:
    assert script.handed()["MASTER_ADDR"] == "n7"


@pytest.mark.parametrize("name", ["pretrain.sbatch", "sweep.sbatch", "command.sbatch"])
@pytest.mark.parametrize(
    ("variable", "words"),
    [("PLUMBLINE_ROOT", "no slurm/job.sh in /none"), ("PLUMBLINE_PYTHON", "cannot execute /none")],
)
def test_a_node_that_lacks_what_a_job_needs_is_named(script: Script, name: str, variable: str, words: str) -> None:
    done = script.run(name, **{variable: "/none"})
    assert done.returncode == 2
    assert f"{name}: error: {words} on n7: " in done.stderr
    assert "if other nodes have it, submit with --exclude=n7" in done.stderr


def test_a_python_that_does_not_run_is_told_with_its_node(script: Script) -> None:
    (script.folder / "python").write_text("#!/bin/false\n")
    done = script.run()
    assert done.returncode == 2
    assert "error: launcher/requeue.py did not say on n7 what is saved" in done.stderr
