"""Say where our own files are: a checkout, or, of a wheel, the folder `plumbline` of an environment."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
"""Holds configs/, data/, launcher/, model/ and slurm/."""


def is_checkout() -> bool:
    """Return whether they are a checkout, in which corpora and runs have their places."""
    return (ROOT / "pyproject.toml").is_file()


def as_typed(name: str) -> str:
    """Return one of our files as one types it here: `name` as it is in the root of a checkout, else its whole path."""
    return name if is_checkout() and Path.cwd() == ROOT else str(ROOT / name)
