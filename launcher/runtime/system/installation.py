"""Locate the files of Plumbline, in a checkout or in an installed wheel, and say how they are typed."""

import json
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
"""Holds configs/, data/, launcher/, model/ and slurm/."""


def is_checkout() -> bool:
    """Return whether they are a checkout, in which corpora and runs have their places."""
    return (ROOT / "pyproject.toml").is_file()


def as_typed(name: str) -> str:
    """Return one of our files as one types it here: `name` as it is in the root of a checkout, else its whole path."""
    return name if is_checkout() and Path.cwd() == ROOT else str(ROOT / name)


def training_on(corpus: str) -> str:
    """Return the overrides that train on a corpus in a run of its name, as one types them in a shell."""
    # A string in quotes is YAML's as well; a name alone may be a number, a date or no
    path = corpus if re.fullmatch(r"[\w.~-]*/[\w./~-]+", corpus) else json.dumps(corpus, ensure_ascii=False)
    name = re.sub(r"[^\w.-]+", "-", corpus.rpartition("/")[2])
    return f"run.name={name} {shlex.quote(f'data.train=[{{path: {path}}}]')}"
