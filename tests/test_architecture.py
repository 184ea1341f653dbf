"""The rooms: who may import whom, names that shadow nothing, files short enough to read, entry points that explain."""

import ast
import os
import re
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[1]
ROOMS = ("data", "launcher", "model", "tests")
LAUNCHER = REPOSITORY / "launcher"
MODULES = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))
ENTRY_POINTS = sorted(path for path in LAUNCHER.glob("*.py") if path.name != "__init__.py")
PARSERS = [path for path in ENTRY_POINTS if "ArgumentParser(" in path.read_text(encoding="utf-8")]

# The arrows launcher -> launcher.runtime -> {model, data}: room -> what its files may import of ours
ALLOWED = {
    "data": {"data"},
    "model": {"model"},
    "launcher.runtime": {"launcher.runtime", "model", "data"},
    "launcher": {"launcher.runtime", "model", "data"},
}


def room_of(module: str) -> str | None:
    """The room of a dotted name; None for what is not ours."""
    if module == "launcher.runtime" or module.startswith("launcher.runtime."):
        return "launcher.runtime"
    top = module.partition(".")[0]
    return top if top in ROOMS else None


def imported(path: Path) -> set[str]:
    """Dotted names of everything a file imports, at its top or inside functions."""
    package = path.relative_to(REPOSITORY).parent.parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from launcher import runtime` names a module, too
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", ALLOWED)
def test_arrows_between_rooms(room: str) -> None:
    files = [path for path in MODULES if room_of(".".join(path.relative_to(REPOSITORY).with_suffix("").parts)) == room]
    assert files
    wrong = {
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files
        for name in imported(path)
        if room_of(name) is not None and room_of(name) not in ALLOWED[room]
    }
    assert not wrong


@pytest.mark.parametrize("room", ["model", "data"])
def test_the_lower_rooms_do_not_know_how_they_are_run(room: str) -> None:
    tops = {name.partition(".")[0] for path in (REPOSITORY / room).rglob("*.py") for name in imported(path)}
    assert not tops & {"argparse", "deepspeed", "omegaconf", "tensorboard"}


def test_no_name_beside_an_entry_point_hides_a_library() -> None:
    """`python launcher/x.py` puts launcher/ first on the path, where evaluate.py would be `import evaluate` to all."""
    libraries = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    beside = {path.stem for path in LAUNCHER.iterdir() if path.suffix == ".py" or path.is_dir()} - {"__init__"}
    beside -= {"__pycache__"}
    assert "pretrain" in beside
    taken = {name for name in beside if PathFinder.find_spec(name, sorted(libraries)) is not None}
    assert not taken
    assert not beside & set(sys.stdlib_module_names)


def test_no_room_hides_the_standard_library() -> None:
    assert not {path.name for path in REPOSITORY.iterdir() if path.is_dir()} & set(sys.stdlib_module_names)


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8").count("\n")
        for path in [*MODULES, *(REPOSITORY / "slurm").rglob("*.py")]
    }
    assert len(lengths) > 30
    assert {name: length for name, length in lengths.items() if length > 450} == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(REPOSITORY))
        for path in MODULES
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_every_entry_point_explains_itself() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    started = {
        path: subprocess.Popen(
            [sys.executable, str(path), "--help"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for path in PARSERS
    }
    assert {"pretrain", "plan", "prepare", "eval", "export", "generate", "submit"} <= {path.stem for path in started}
    for path, process in started.items():
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        assert output.startswith("usage: ")
        assert f"launcher/{path.name} " in output, f"{path.name} --help shows no example"


def test_every_package_is_installed() -> None:
    declared = (
        (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8").partition("packages = [")[2].partition("]")[0]
    )
    found = {
        ".".join(file.parent.relative_to(REPOSITORY).parts)
        for room in ("data", "launcher", "model")
        for file in (REPOSITORY / room).rglob("__init__.py")
    }
    assert set(re.findall(r'"([\w.]+)"', declared)) == found
