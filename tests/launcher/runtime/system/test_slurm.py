"""What is asked of a cluster, as the options and the script that ask for it."""

import subprocess
from pathlib import Path

import pytest

from plumbline.launcher.runtime.system.slurm import REPOSITORY, Request, next_number, write_script

ARRAY = Request(array=4, gpus_per_task=2, time="8:00:00")


def asked(script: Path) -> list[str]:
    """Return the words of the one sbatch command of a script."""
    echoing = script.read_text().replace("sbatch --parsable", "printf '%s\\n'")
    done = subprocess.run(["bash", "-c", echoing], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_script_asks_for_what_is_known_and_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "submit-1.sh"
    write_script(script, "# why", {"job-name": "a b", **ARRAY.options}, "sweep.sbatch", ["--plan=it's.json"])
    assert asked(script) == [
        "--job-name=a b",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--array=0-3",
        "--gpus-per-task=2",
        "--time=8:00:00",
        str(REPOSITORY / "slurm" / "sweep.sbatch"),
        "--plan=it's.json",
    ]


def test_each_submission_has_its_number(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "slurm"
    assert next_number(folder) == 1
    write_script(folder / "submit-1.sh", "# first", ARRAY.options, "sweep.sbatch", [])
    assert next_number(folder) == 2
