"""What documents and lists say of the sources is there: functions of a walk, the drawing of rooms, mutations."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

from tests.benchmarks import draw_rooms, mutations

REPOSITORY = Path(__file__).resolve().parents[1]
WALK = REPOSITORY / "docs" / "architecture.md"
ROOMS = ("model", "data", "launcher")
"""Folders whose READMEs name every file."""
KINDS = "One file for each"
"""Words of a README that need not name files which the room's `__init__.py` or `kinds.py` imports: the table there has
them."""


def defined(file: Path) -> set[str]:
    """Return the names of functions and classes of a file, and of methods with their class."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return names


def test_the_walk_names_what_is_there() -> None:
    text = WALK.read_text(encoding="utf-8")
    steps = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    assert len(steps) > 30
    assert [(file, name) for file, name in steps if name not in defined(REPOSITORY / file)] == []
    places = re.findall(r"`((?:launcher|model|data|tests)/[\w/.]*)`", text)
    assert [place for place in places if not (REPOSITORY / place).exists()] == []


def test_every_room_has_its_line() -> None:
    text = WALK.read_text(encoding="utf-8")
    rooms = {room for room in draw_rooms.imports() if room not in ("model", "data")}
    assert {room for room in rooms if f"`{room}/" not in text} == set()


def unnamed(part: Path) -> list[str]:
    """Return the files below a folder whose room, the nearest folder above with a README, does not name them."""
    missing = []
    for file in sorted(part.rglob("*.py")):
        room = next(folder for folder in file.parents if (folder / "README.md").is_file())
        text = (room / "README.md").read_text(encoding="utf-8")
        named = {"__init__.py", *re.findall(r"[\w/*]+\.py\b", text)}  # stock.py, native/lookahead.py, *_plot.py
        if any(fnmatch(name, each) for each in named for name in (file.name, str(file.relative_to(room)))):
            continue
        module = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        tables = [room / name for name in ("__init__.py", "kinds.py") if KINDS in text]
        table = "".join(each.read_text(encoding="utf-8") for each in tables if each.is_file())
        if f"from plumbline.{module} import" not in table:
            missing.append(str(file.relative_to(REPOSITORY)))
    return missing


def test_every_file_has_its_line() -> None:
    assert [file for part in ROOMS for file in unnamed(REPOSITORY / part)] == []


def test_the_drawing_is_that_of_the_sources() -> None:
    drawn = draw_rooms.DRAWING.read_text(encoding="utf-8")
    assert drawn == draw_rooms.draw(), "run python tests/benchmarks/draw_rooms.py"


def test_every_mutation_is_of_a_text_that_is_there_once() -> None:
    found = mutations.read_mutations()
    assert len(found) >= 60
    assert len({mutation.change for mutation in found}) == len(found)
    assert list(mutations.problems(found, REPOSITORY)) == []
