"""Say how a corpus that is not there is made: from the text that lies in its place, if any does."""

from pathlib import Path


class NoCorpusError(ValueError):
    """State that no corpus is at a path of this machine, and how one is made."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{problem}. Make one with: {how_to_prepare(path, 'train-bpe:8192')}")


def how_to_prepare(path: Path, tokenizer: str, options: str = "") -> str:
    """Return the command that makes a corpus at a path; what is there already is the text to make it of, elsewhere."""
    source, output = "PATH", path
    if path.suffix in (".bin", ".idx"):  # one file of a pair
        output = path.with_suffix("")
    elif path.exists():
        source, output = str(path), Path("corpora") / (path.stem or "text")
        if output.resolve() == path.resolve():
            output = output.with_name(f"{output.name}-tokens")
    return f"python launcher/prepare.py --source {source} --tokenizer {tokenizer} --output {output}{options}"
