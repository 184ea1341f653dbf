"""What documents and lists say of the sources is there: functions of a walk, the drawing of rooms, mutations."""

import ast
import re
from pathlib import Path

from tests.benchmarks import draw_rooms, mutations

REPOSITORY = Path(__file__).resolve().parents[1]
WALK = REPOSITORY / "docs" / "architecture.md"


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


def test_the_drawing_is_that_of_the_sources() -> None:
    drawn = draw_rooms.DRAWING.read_text(encoding="utf-8")
    assert drawn == draw_rooms.draw(), "run python tests/benchmarks/draw_rooms.py"


def test_every_mutation_is_of_a_text_that_is_there_once() -> None:
    found = mutations.read_mutations()
    assert len(found) >= 60
    assert len({mutation.change for mutation in found}) == len(found)
    assert list(mutations.problems(found, REPOSITORY)) == []
