"""Write files that are there whole or not at all."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, whoever is killed meanwhile."""
    staging = path.with_name(f".{path.name}.staging")
    staging.write_text(text, encoding="utf-8")
    staging.replace(path)
