"""Explain how to make a missing corpus, from the text that lies in its place if there is any."""

from pathlib import Path


class NoCorpusError(ValueError):
    """State that there is no corpus at a path on this machine, and how to make one."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{problem}. Make one with: {how_to_prepare(path, 'train-bpe:8192')}")


def how_to_prepare(path: Path, tokenizer: str, options: str = "") -> str:
    """Return the command that makes a corpus at a path; text that is already there becomes the source instead."""
    source, output = "PATH", path
    if path.suffix in (".bin", ".idx"):  # one file of a pair
        output = path.with_suffix("")
    elif path.exists():
        source, output = str(path), Path("corpora") / (path.stem or "text")
        if output.resolve() == path.resolve():
            output = output.with_name(f"{output.name}-tokens")
    return f"python launcher/prepare.py --source {source} --tokenizer {tokenizer} --output {output}{options}"
