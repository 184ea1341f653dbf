"""Locate the files of Plumbline, in a checkout or in an installed wheel, and how to type their paths."""

import json
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
"""Folder with configs/, data/, launcher/, model/ and slurm/."""


def is_checkout() -> bool:
    """Return whether the files are in a checkout, which has places for corpora and runs."""
    return (ROOT / "pyproject.toml").is_file()


def as_typed(name: str) -> str:
    """Return the path of one of our files as typed here: `name` in the root of a checkout, else the full path."""
    return name if is_checkout() and Path.cwd() == ROOT else str(ROOT / name)


def training_on(corpus: str) -> str:
    """Return the overrides that train on a corpus in a run of that name, as typed in a shell."""
    # A quoted JSON string is also valid YAML; a bare name may be read as a number, a date or false
    path = corpus if re.fullmatch(r"[\w.~-]*/[\w./~-]+", corpus) else json.dumps(corpus, ensure_ascii=False)
    name = re.sub(r"[^\w.-]+", "-", corpus.rpartition("/")[2])
    return f"run.name={name} {shlex.quote(f'data.train=[{{path: {path}}}]')}"
