"""The rooms: who may import whom, names that shadow nothing, files short enough to read."""

import ast
import re
import sys
import sysconfig
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
ROOMS = ("data", "launcher", "model", "tests")
LAUNCHER = REPOSITORY / "launcher"
MODULES = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))

# launcher -> launcher/runtime -> {model, data}: room -> what its files may import of ours
ALLOWED = {
    "data": {"data"},
    "model": {"model"},
    "launcher.runtime": {"launcher.runtime", "model", "data"},
    "launcher": {"launcher.runtime", "model", "data"},
}
# Inside launcher/runtime a room may import those that stand before it, never one that stands behind it
RUNTIME = (
    "system", "cluster", "ranks", "commands", "scoring", "optim", "trackers", "config", "run", "engine", "checkpoint",
    "doctor", "models", "inspection", "laws", "train", "replay", "export", "harness", "quantize", "report", "sweep",
)  # fmt: skip

# First words of docstrings that do not begin with a verb
NO_VERBS = {
    "a", "all", "also", "an", "any", "as", "at", "both", "by", "each", "every", "everything", "for", "from", "how",
    "if", "in", "its", "largest", "losses", "mean", "no", "none", "nothing", "numbers", "of", "on", "one", "only",
    "some", "such", "that", "the", "their", "there", "these", "this", "those", "to", "tokens", "two", "values",
    "weights", "what", "when", "where", "whether", "which", "who", "why", "with",
}  # fmt: skip
NO_IMPERATIVE = re.compile(r"(?<!s)s$|tion$|(?<!Br)ing$")
MODULE = "the module"


def module_name(path: Path) -> str:
    """Return the dotted name by which a file is imported."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    ours = parts if parts[0] == "tests" else ("plumbline", *parts)
    return ".".join(ours).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    """Return the room of a dotted name; None for what is not ours."""
    top, _, inside = module.partition(".")
    if top == "tests":
        return "tests"
    if top != "plumbline":
        return None
    return "launcher.runtime" if inside.startswith("launcher.runtime") else inside.partition(".")[0]


def runtime_room(module: str) -> str | None:
    """Return the room inside launcher/runtime; None for what lies elsewhere."""
    return module.split(".")[3] if module.startswith("plumbline.launcher.runtime.") else None


@cache
def imported(path: Path) -> set[str]:
    """Dotted names of everything a file imports, at its top or inside functions."""
    package = module_name(path.with_name("__init__.py")).split(".")
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
    files = [path for path in MODULES if room_of(module_name(path)) == room]
    assert files
    wrong = {
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files
        for name in imported(path)
        if room_of(name) is not None and room_of(name) not in ALLOWED[room]
    }
    assert not wrong


def test_arrows_inside_the_runtime() -> None:
    assert {path.name for path in (LAUNCHER / "runtime").iterdir() if (path / "__init__.py").exists()} == set(RUNTIME)
    wrong = set()
    for path in (LAUNCHER / "runtime").rglob("*/*.py"):
        may = RUNTIME[: RUNTIME.index(path.relative_to(LAUNCHER / "runtime").parts[0]) + 1]
        found = {runtime_room(name) for name in imported(path)} - {None, *may}
        wrong |= {f"{path.relative_to(REPOSITORY)} imports {room}" for room in found}
    assert not wrong


def test_nobody_imports_in_a_circle() -> None:
    """Imports inside functions and for annotations alone count as well: they hide a circle, they do not open it."""
    modules = {module_name(path): path for path in MODULES}
    imports = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imported(path)} & set(modules)
        for module, path in modules.items()
    }
    waiting = dict(imports)
    while ready := [module for module, needs in waiting.items() if not needs & set(waiting)]:
        for module in ready:
            del waiting[module]
    assert sorted(waiting) == []


def test_ours_is_imported_as_plumbline() -> None:
    tops = {room for room in ROOMS if room != "tests"}
    wrong = {
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in MODULES
        for name in imported(path)
        if name.partition(".")[0] in tops
    }
    assert not wrong


@pytest.mark.parametrize("room", ["model", "data"])
def test_the_lower_rooms_do_not_know_how_they_are_run(room: str) -> None:
    tops = {name.partition(".")[0] for path in (REPOSITORY / room).rglob("*.py") for name in imported(path)}
    assert not tops & {"argparse", "deepspeed", "omegaconf", "tensorboard"}


def test_deepspeed_is_known_to_the_engine_and_to_start_up_alone() -> None:
    runtime = LAUNCHER / "runtime"
    users = {path for path in MODULES if any(name.partition(".")[0] == "deepspeed" for name in imported(path))}
    ours = {path for path in users if room_of(module_name(path)) != "tests"}
    assert ours == {
        runtime / "engine" / "deepspeed.py",
        runtime / "engine" / "deepspeed_fixes.py",
        runtime / "engine" / "on_device.py",
        runtime / "engine" / "zero_shards.py",
        runtime / "ranks" / "deepspeed_start.py",
        runtime / "ranks" / "process_group.py",
    }
    # Its attributes, which work without an import
    internal = re.compile(r"ds_\w*(tensor|shape|numel|id)\b|_hp_mapping|fp32_partitioned_groups_flat|update_lp_params")
    engine = {path for path in MODULES if path.is_relative_to(LAUNCHER) and internal.search(path.read_text())}
    assert engine == {runtime / "engine" / "zero_shards.py"}


def calls(path: Path) -> set[str]:
    """Return the names of what a file calls; a call of print that chooses a stream is print(file)."""
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return {
        ast.unparse(call.func) + ("(file)" if "file" in {word.arg for word in call.keywords} else "") for call in found
    }


def test_commands_print_their_answers_and_the_logger_everything_else() -> None:
    runtime = LAUNCHER / "runtime"
    called = {path: calls(path) for path in MODULES if room_of(module_name(path)) != "tests"}
    assert {path for path, names in called.items() if "print" in names} - set(LAUNCHER.glob("*.py")) == {
        runtime / "commands" / "cli.py"  # print_json
    }
    by_hand = {"print(file)", "warnings.warn", "sys.stdout.write", "sys.stderr.write"}
    assert {path for path, names in called.items() if by_hand & names} == {runtime / "system" / "log.py"}


def test_models_are_assembled_in_one_place() -> None:
    launcher = {path: path.read_text(encoding="utf-8") for path in LAUNCHER.rglob("*.py")}
    assembled = re.compile(r"\b(CausalLM|TrainedLM|apply_precision)\(")
    found = {path for path, text in launcher.items() if assembled.search(text)}
    assert found == {LAUNCHER / "runtime" / "engine" / "build.py"}


def test_no_name_beside_an_entry_point_hides_a_library() -> None:
    """`python launcher/x.py` puts launcher/ first on the path, where evaluate.py would be `import evaluate` to all."""
    libraries = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    beside = {path.stem for path in LAUNCHER.iterdir() if path.suffix == ".py" or path.is_dir()} - {"__init__"}
    beside -= {"__pycache__", "plumbline"}
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


def begins_with_a_verb(text: str) -> bool:
    """Return whether a docstring begins with an imperative, as far as its first word tells."""
    first = re.match(r"[A-Z][a-z]+\b", text)  # neither a formula nor an acronym
    return first is not None and first[0].lower() not in NO_VERBS and not NO_IMPERATIVE.search(first[0])


def fragments(source: str) -> list[str]:
    """Return the functions and classes, and MODULE, whose docstring does not begin with a verb."""
    named = [
        (MODULE if isinstance(node, ast.Module) else node.name, ast.get_docstring(node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]
    return [name for name, text in named if text and not begins_with_a_verb(text)]


def test_docstrings_begin_with_a_verb() -> None:
    """Ruff holds this for functions (D401), but not for modules, classes and properties. Tests state what holds."""
    wrong = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in MODULES
        for name in fragments(path.read_text(encoding="utf-8"))
        if not name.startswith("test_") and (name != MODULE or room_of(module_name(path)) != "tests")
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Return the newest checkpoint.", True),
        ("Hold one cell of a sweep.", True),
        ("The newest checkpoint.", False),
        ("What a sweep found.", False),
        ("[B, T, V]: what is predicted.", False),
        ("log2 of the learning rate.", False),
        ("GPTQ: columns are rounded one after the other.", False),
        ("Optimizers, schedules and averages.", False),
        ("Calibration: what the layers see.", False),
        ("Decoding with thoughts.", False),
    ],
)
def test_a_docstring_that_begins_otherwise_is_found(text: str, good: bool) -> None:
    for head in ("def f():", "class f:", "class C:\n  @property\n  def f(self):"):
        assert fragments(f'{head}\n    """{text}"""') == ([] if good else ["f"])
    assert fragments(f'"""{text}"""\n\nX = 1') == ([] if good else [MODULE])


def test_every_package_is_installed() -> None:
    declared = (
        (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8").partition("packages = [")[2].partition("]")[0]
    )
    code = {
        module_name(file) for room in ("data", "launcher", "model") for file in (REPOSITORY / room).rglob("__init__.py")
    }
    read = {  # by commands
        f"plumbline.{'.'.join(file.relative_to(REPOSITORY).parent.parts)}"
        for file in (*(REPOSITORY / "configs").rglob("*.*"), *(REPOSITORY / "slurm").glob("*.*"))
    }
    assert set(re.findall(r'"([\w.]+)"', declared)) == code | read
