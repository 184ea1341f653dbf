"""Draw which room imports which, from the sources, as docs/images/rooms.svg.

    python tests/benchmarks/draw_rooms.py

An arrow goes from a room to one that it imports, unless it reaches that one by way of another; commands may import any
room and have no arrows. Each box says what the `__init__.py` of its room says first. tests/test_documents.py compares
the drawing with the sources.
"""

import ast
import textwrap
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DRAWING = REPOSITORY / "docs" / "images" / "rooms.svg"
COMMANDS = "launcher/*.py: one file for each command, which reads its command line, calls rooms and prints"
BOX, GAP, MARGIN = (240, 92), (18, 28), 14  # pixels: width and height of a box; between boxes; around all
COLUMNS = 35  # characters of a line in a box
STYLE = """
  rect { fill: #f6f8fa; stroke: #57606a } .lower rect { fill: #e8f1e8 } .commands rect { fill: #fff4e0 }
  text { font: 12px sans-serif; fill: #24292f } .name { font-weight: bold; font-size: 14px }
  path { fill: none; stroke: #57606a; stroke-width: 1.3; marker-end: url(#tip) }
"""


def imports() -> dict[str, set[str]]:
    """Return each room with the rooms that its files import."""
    rooms: dict[str, set[str]] = {}
    for file in sorted(
        file for top in ("launcher/runtime", "model", "data") for file in (REPOSITORY / top).rglob("*.py")
    ):
        room = room_of(f"plumbline.{file.relative_to(REPOSITORY).with_suffix('').as_posix().replace('/', '.')}")
        if room is None:
            continue
        found = rooms.setdefault(room, set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("plumbline."):
                names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
                found |= {place for name in names if (place := room_of(name)) not in (None, room)}
    return rooms


def room_of(module: str) -> str | None:
    """Return the room of a module, plumbline.launcher.runtime.engine.build say."""
    parts = module.split(".")[1:]
    if parts[0] in ("model", "data"):
        return parts[0]
    return "/".join(parts[:3]) if parts[:2] == ["launcher", "runtime"] and len(parts) > 3 else None


def reduced(rooms: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out arrows to rooms that another arrow reaches."""
    below: dict[str, set[str]] = {}

    def reached(room: str) -> set[str]:
        if room not in below:
            below[room] = rooms[room].union(*(reached(other) for other in rooms[room]))
        return below[room]

    return {room: others - set().union(*(reached(other) for other in others)) for room, others in rooms.items()}


def levels(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return rooms from the top down, each as low as what it imports allows, in the order of their names."""
    heights: dict[str, int] = {}

    def height_of(room: str) -> int:
        if room not in heights:
            heights[room] = 1 + max((height_of(other) for other in arrows[room]), default=-1)
        return heights[room]

    top = max(height_of(room) for room in arrows)
    return [[room for room in sorted(arrows) if heights[room] == height] for height in range(top, -1, -1)]


def about(room: str) -> str:
    """Return what a room says about itself, up to the first stop."""
    docstring = ast.get_docstring(ast.parse((REPOSITORY / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].partition(". ")[0].rstrip(".") + "."


def draw() -> str:
    """Return the drawing."""
    arrows = reduced(imports())
    rows = levels(arrows)
    width = max(len(row) for row in rows) * (BOX[0] + GAP[0]) - GAP[0] + 2 * MARGIN
    above = 34 + GAP[1]  # the commands
    height = above + len(rows) * (BOX[1] + GAP[1]) - GAP[1] + 2 * MARGIN
    corners = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * (BOX[0] + GAP[0]) + GAP[0]) / 2
        for column, room in enumerate(row):
            corners[room] = (left + column * (BOX[0] + GAP[0]), above + MARGIN + number * (BOX[1] + GAP[1]))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#57606a"/></marker>',
        f'<rect width="{width}" height="{height}" style="fill: white; stroke: none"/>',
        f'<g class="commands"><rect x="{MARGIN}" y="{MARGIN}" width="{width - 2 * MARGIN}" height="34" rx="5"/>'
        f'<text class="name" x="{MARGIN + 9}" y="{MARGIN + 22}">{COMMANDS}</text></g>',
    ]
    for room, others in sorted(arrows.items()):
        x, y = corners[room][0] + BOX[0] / 2, corners[room][1] + BOX[1]
        for other in sorted(others):
            to_x, to_y = corners[other][0] + BOX[0] / 2, corners[other][1] - 2
            bend = (to_y - y) / 2
            lines.append(f'<path d="M{x:g},{y:g} C{x:g},{y + bend:g} {to_x:g},{to_y - bend:g} {to_x:g},{to_y:g}"/>')
    for room, (x, y) in corners.items():
        kind = "lower" if room in ("model", "data") else "runtime"
        lines.append(f'<g class="{kind}"><rect x="{x:g}" y="{y:g}" width="{BOX[0]}" height="{BOX[1]}" rx="5"/>')
        lines.append(f'<text class="name" x="{x + 9:g}" y="{y + 21:g}">{room.removeprefix("launcher/")}</text>')
        for number, line in enumerate(textwrap.wrap(about(room), COLUMNS)[:4]):
            lines.append(f'<text x="{x + 9:g}" y="{y + 39 + 15 * number:g}">{escape(line)}</text>')
        lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    DRAWING.write_text(draw(), encoding="utf-8")
    print(DRAWING.relative_to(REPOSITORY))
