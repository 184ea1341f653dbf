"""How entry points start: what they import before they have read the command line, and what some never import."""

import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE, REPOSITORY, environment

SCRIPTS = {path.stem for path in (REPOSITORY / "launcher").glob("*.py")}
VERBS = sorted(SCRIPTS - {"__init__", "__main__", "plumbline"})
SLOW = {
    "torch",
    "deepspeed",
    "transformers",
    "scipy",
    "matplotlib",
    "datasets",
    "tensorboard",
    "lm_eval",
    "wandb",
    "mlflow",
    "trackio",
}
"""Libraries that take long to import, and that no command line is worth."""
MISSING = {
    "doctor": ["--config", "no/file.yaml"],
    "eval": ["--model", "no/run", "--data", "no/corpus"],
    "export": ["--model", "no/run", "--output", "exported"],
    "fit": ["no/rows.jsonl", "--output", "law"],
    "generate": ["--model", "no/run"],
    "plan": ["--config", "no/file.yaml"],
    "quantize": ["--model", "no/run", "--data", "no/corpus", "--recipes", "weights", "--output", "rows"],
    "replay": ["no/run", "--verify"],
    "report": ["no/run"],
    "show": ["no/corpus"],
    "status": ["no/run"],
    "submit": ["--config", "no/file.yaml", "--nodes", "1", "--gpus-per-node", "1"],
    "sweep": ["--config", "no/file.yaml"],
}
"""Command lines that name what is not there."""


def run_in_forks(*sequences: list[list[str]]) -> list[dict[str, Any]]:
    """Run sequences of commands by run_in_forks.py; returns what it prints."""
    words = [sys.executable, str(Path(__file__).with_name("run_in_forks.py")), json.dumps(sequences)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = json.loads(done.stdout)
    return told


def test_command_lines_are_read_before_anything_slow_is_imported() -> None:
    commands = [[verb, option] for verb in VERBS for option in ("--help", "--no-such-option")]
    commands += [[verb, *arguments] for verb, arguments in MISSING.items()]
    told = run_in_forks(*([command] for command in commands))
    assert len(told) == len(commands) >= 36
    for (verb, *arguments), outcome in zip(commands, told, strict=True):
        assert not SLOW & set(outcome["imported"]), f"{verb} {arguments}"
        if arguments == ["--help"]:
            assert outcome["codes"] == [0], outcome["errors"]
            assert outcome["output"].startswith("usage: ")
            assert f"launcher/{verb}.py" in outcome["output"].partition("\n")[2], f"{verb} --help shows no example"
            assert "(default: (" not in " ".join(outcome["output"].split()), f"{verb} --help shows what no one can type"
        else:
            assert outcome["codes"] == [2], outcome["errors"]
            assert outcome["errors"].startswith("usage: ")
            missing = "no such file or folder" in outcome["errors"]
            assert missing == (arguments != ["--no-such-option"]), outcome["errors"]


def test_requeue_needs_no_other_packages_than_its_page_says(tiny_config: Path, tmp_path: Path) -> None:
    """A site with containers installs these few beside its nodes' own Python."""
    page = " ".join((REPOSITORY / "slurm" / "README.md").read_text(encoding="utf-8").split())
    named = re.search(r"It needs ([\w, ]+) and (\w+), but not torch", page)
    assert named is not None
    allowed, wanted = set[str](), [*named[1].split(", "), named[2]]
    while wanted:  # with what they need themselves
        if (name := _package(wanted.pop())) not in allowed:
            allowed.add(name)
            wanted += [each for each in requires(name) or () if "extra ==" not in each]
    lacking = [
        module
        for module, names in packages_distributions().items()
        if not allowed & {_package(name) for name in names} and module not in ("plumbline", "_distutils_hack")
    ]
    script = f"""
import runpy, sys
class Lacking:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {lacking}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Lacking())
sys.argv = ["launcher/requeue.py", "--config", {str(tiny_config)!r}, {f"run.root={tmp_path}"!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert {"torch", "numpy"} <= {*lacking}


def _package(requirement: str) -> str:
    """Return the normalized name of a package that a requirement begins with."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def test_verbs_that_run_no_model_import_neither_deepspeed_nor_transformers(
    tiny_config: Path, corpus: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    bits = {"weight_bits": 16, "activation_bits": 16, "kv_bits": 16}
    losses = [
        {"parameters": size, "tokens": tokens, **bits, "loss": 1.7 + 400 / size**0.34 + 400 / tokens**0.28}
        for size in (1e7, 3e7, 1e8)
        for tokens in (1e9, 4e9, 1.6e10)
    ]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in losses), encoding="utf-8")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "tokens": 8, "loss": 3.0}\n', encoding="utf-8")
    (run / "config.yaml").touch()
    config = ["--config", str(tiny_config), f"run.root={tmp_path}"]
    (light, torch, traced) = run_in_forks(
        [
            ["fit", str(rows), "--output", str(tmp_path / "law"), "--form", "chinchilla", "--bootstrap", "0"],
            ["show", str(corpus)],
            ["status", str(run)],
        ],
        [
            ["report", str(run)],
            ["submit", *config, "--tasks-per-node", "1", "--dry-run"],
            ["plan", *config, "--parameters"],
        ],
        [["plan", *config, "--law", "besiroglu2404"]],  # tensors without values need sympy
    )
    assert (light["codes"], torch["codes"], traced["codes"]) == ([0, 0, 0], [0, 0, 0], [0]), (light, torch, traced)
    assert not {"deepspeed", "transformers"} & {*light["imported"], *torch["imported"], *traced["imported"]}
    assert "sympy" not in torch["imported"], "torch's compiler was imported, which takes as long as all the rest"
    assert "torch" not in light["imported"]
