"""Kinds describe themselves: nobody outside a kind's own file compares against its name."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from plumbline.launcher.runtime.optim.horizon import HorizonConfig
from plumbline.launcher.runtime.optim.optimizer import OPTIMIZERS
from plumbline.launcher.runtime.optim.schedule import COOLDOWNS, SHAPES, ScheduleConfig
from plumbline.model.attention import ATTENTIONS
from plumbline.model.attention.kind import Attention
from plumbline.model.blocks import BLOCKS
from plumbline.model.blocks.kind import Block
from plumbline.model.export.targets import TARGETS
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.parameterization.config import ParameterizationConfig
from plumbline.model.quantization.post_training.recipes import METHODS

REPOSITORY = Path(__file__).resolve().parents[1]
# The code of exported folders is copied there as it is, so it imports nothing of ours and names kinds itself
STANDALONE = REPOSITORY / "model" / "export" / "native"
SOURCES = sorted(
    path
    for room in ("launcher", "model", "data")
    for path in (REPOSITORY / room).rglob("*.py")
    if not (path.parent == STANDALONE and path.name != "__init__.py")
)


def own_files() -> dict[str, Path]:
    """Return the file of every kind by its name."""
    kinds: list[tuple[str, Any]] = [*BLOCKS.items(), *ATTENTIONS.items()]
    kinds += [(name, getattr(target, "build", type(target))) for name, target in TARGETS.items()]
    kinds += [(name, kind.make) for name, kind in OPTIMIZERS.items()]
    for settings in get_args(ObjectiveConfig):
        kinds += [(name, settings) for name in get_args(settings.model_fields["name"].annotation)]
    kinds += [(name, method.round) for name, method in METHODS.items()]
    kinds += [(name, ScheduleConfig) for name in (*COOLDOWNS, *SHAPES)]
    for section in (ParameterizationConfig, HorizonConfig):
        kinds += [(name, section) for name in get_args(section.model_fields["rule"].annotation) if name != "none"]
    return {name: Path(inspect.getfile(kind)).resolve() for name, kind in kinds}


def constants(node: ast.AST) -> Iterator[str]:
    """Yield the strings that a node is, or holds as a tuple, list or set."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for element in node.elts:
            yield from constants(element)


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and value of every string that a value is compared with: ==, in, a case, a key of a literal table."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            sides = [key for key in node.value.keys if key is not None]
        else:
            continue
        for side in sides:
            for value in constants(side):
                yield node.lineno, value


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("config.block == 'skipless'", ["skipless"]),
        ("'shaped' != config.attention", ["shaped"]),
        ("config.block in ('post_norm', 'sandwich_norm')", ["post_norm", "sandwich_norm"]),
        ("{'shaped': 1, 'pruned': 2}[config.attention]", ["shaped", "pruned"]),
        ("match kind:\n    case 'mixing':\n        pass", ["mixing"]),
        ("block = 'skipless'", []),
    ],
)
def test_every_way_to_compare_is_seen(code: str, found: list[str]) -> None:
    assert [value for _, value in compared(ast.parse(code))] == found


def test_nobody_compares_against_the_name_of_a_kind() -> None:
    files = own_files()
    assert len(SOURCES) > 100
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}: {value}"
        for path in SOURCES
        for line, value in compared(ast.parse(path.read_text(encoding="utf-8")))
        if value in files and files[value] != path
    ]
    assert not wrong


def test_one_objective_is_plain() -> None:
    """A copy of its file that keeps the word is left out of reports, and its memory and replay are taken for plain."""
    assert [kind.__name__ for kind in get_args(ObjectiveConfig) if kind.is_plain] == ["NextTokenConfig"]


@pytest.mark.parametrize(("base", "known"), [(Block, BLOCKS), (Attention, ATTENTIONS)])
def test_every_kind_that_is_written_can_be_chosen(base: type, known: dict[str, type]) -> None:
    written: set[type] = set()
    waiting = [base]
    while waiting:
        below: list[type] = waiting.pop().__subclasses__()
        written |= {kind for kind in below if kind.__module__.startswith("plumbline.")}
        waiting += below
    assert written == set(known.values())
