"""How our code is imported: as `plumbline` alone, installed or not, whatever folders a user has beside."""

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, REPOSITORY, environment

ROOMS = ("data", "launcher", "model")
FILES = ("configs", "slurm")
"""Rooms without code, which commands read."""
BUILD = """
import sys
from setuptools import build_meta

built = build_meta.build_wheel("built"), build_meta.build_editable("built_editable")
print(*built, file=sys.__stderr__)
"""
FIND = """
import json, site, sys
from importlib.util import find_spec

site.addsitedir(sys.argv[1])
names = [top + room for top in ("", "plumbline.") for room in ("data", "launcher", "model")]
print(json.dumps({name: find_spec(name).origin for name in names}))
"""

SCRIPT = """
import sys

sys.path[:0] = [{folder!r}]
from plumbline.launcher.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
"""
SHORT = ("train.steps=2", "train.eval_interval=null")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of what is installed, which no environment knows; its rooms say that they were imported."""
    copy = tmp_path / "checkout"
    for room in ROOMS:
        shutil.copytree(REPOSITORY / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
        with (copy / room / "__init__.py").open("a", encoding="utf-8") as file:
            file.write(f'\nprint("{room} of the copy")\n')
    for room in FILES:
        shutil.copytree(REPOSITORY / room, copy / room)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    return copy


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return the folder of a user who has packages with the names of our rooms."""
    for room in ROOMS:
        (tmp_path / "mine" / room).mkdir(parents=True)
        (tmp_path / "mine" / room / "__init__.py").write_text("raise AssertionError('imported a folder of the user')")
    return tmp_path / "mine"


def run(words: list[str | Path], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run Python in a folder that is also on its path."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment({"PYTHONPATH": str(folder)}),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_script_runs_the_code_of_its_own_checkout(checkout: Path, tiny_config: Path, mine: Path) -> None:
    done = run([checkout / "launcher" / "plan.py", "--config", tiny_config], mine)
    assert {f"{room} of the copy" for room in ROOMS} <= set(done.stdout.splitlines())


def check_console(wheel: Path, folder: Path, mine: Path, config: Path) -> None:
    """Train from a wheel, by what pip makes a script of, in the folder of a user."""
    zipfile.ZipFile(wheel).extractall(folder)
    script = [each for distribution in distributions(path=[str(folder)]) for each in distribution.entry_points]
    assert [(each.name, each.value) for each in script] == [("plumbline", "plumbline.launcher.__main__:main")]
    (mine / "plumbline").write_text(SCRIPT.format(folder=str(folder)), encoding="utf-8")
    done = run([mine / "plumbline", "pretrain", "--config", config, "run.name=wheel", *SHORT], mine)
    assert {f"{room} of the copy" for room in ROOMS} <= set(done.stdout.splitlines())
    assert "\nstarting: 1 rank of 1 thread\n" in done.stdout
    assert done.stdout.rstrip().endswith("/runs/wheel is complete")
    job = ["--config", str(config), "run.name=job", f"run.root={mine}", *SHORT, "--tasks-per-node", "1", "--dry-run"]
    run([mine / "plumbline", "submit", *job], mine)
    submission = (mine / "job" / "slurm" / "submit-1.sh").read_text(encoding="utf-8")
    assert f"\n    {folder}/plumbline/slurm/pretrain.sbatch " in submission


def test_an_installation_brings_plumbline_and_nothing_else(checkout: Path, mine: Path, tiny_config: Path) -> None:
    wheel, editable = run(["-c", BUILD], checkout).stderr.split()[-2:]
    inside = zipfile.ZipFile(checkout / "built" / wheel).namelist()
    assert {name.partition("/")[0] for name in inside} == {"plumbline", f"{wheel.rsplit('-', 3)[0]}.dist-info"}
    sources = {f"plumbline/{file.relative_to(checkout)}" for room in ROOMS for file in (checkout / room).rglob("*.py")}
    assert {name for name in inside if name.endswith(".py")} == sources
    read = [file for room in FILES for file in (checkout / room).rglob("*") if file.is_file() and file.suffix != ".md"]
    asked = {f"plumbline/{file.relative_to(checkout)}" for file in read if "containers" not in file.parts}
    assert len(asked) > 40
    assert {name for name in inside if name.startswith(("plumbline/configs/", "plumbline/slurm/"))} == asked

    check_console(checkout / "built" / wheel, checkout / "wheel", mine, tiny_config)
    site = checkout / "site"
    zipfile.ZipFile(checkout / "built_editable" / editable).extractall(site)
    found = json.loads(run(["-S", "-c", FIND, site], mine).stdout)
    users = {room: str(mine / room / "__init__.py") for room in ROOMS}
    assert found == users | {f"plumbline.{room}": str(checkout / room / "__init__.py") for room in ROOMS}
