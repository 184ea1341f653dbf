"""The recipes of images: linted, and of one content. Building them needs a network, so no test does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

CONTAINERS = REPOSITORY / "slurm" / "containers"
DOCKER, APPTAINER, INSTALL = (CONTAINERS / name for name in ("Dockerfile", "plumbline.def", "install.sh"))


def test_the_dockerfile_is_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("pip install -e '.[dev]'")
    done = subprocess.run([hadolint, DOCKER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_install_script_is_shell() -> None:
    done = subprocess.run(["sh", "-n", INSTALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_both_recipes_install_the_same_from_files_that_are_there() -> None:
    docker, apptainer = DOCKER.read_text(encoding="utf-8"), APPTAINER.read_text(encoding="utf-8")
    copied = next(line for line in docker.splitlines() if line.startswith("COPY ")).split()[1:-1]
    files = re.search(r"%files\n((?: .*\n)+)", apptainer)
    assert files is not None
    pairs = [line.split() for line in files[1].splitlines()]
    assert copied == [source for source, _ in pairs]
    assert [target for _, target in pairs] == [f"/opt/plumbline/{Path(source).name}" for source in copied]
    assert all((REPOSITORY / source).is_file() for source in copied)
    for pattern in (r"^(?:FROM|From:) (\S+)$", r"TORCH_INDEX=(none)$"):
        assert re.findall(pattern, docker, re.MULTILINE) == re.findall(pattern, apptainer, re.MULTILINE) != []


def test_the_image_has_extras_that_there_are() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.partition("[project.optional-dependencies]")[2].partition("[tool.")[0]
    named = re.search(r"for name in \((.*)\) for line", INSTALL.read_text(encoding="utf-8"))
    assert named is not None
    assert set(re.findall(r'"(\w+)"', named[1])) < set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))
