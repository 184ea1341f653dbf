"""Carry out the commands of prepare.py: make a corpus locally or at a URL, enlarge one, merge several, copy ids."""

import logging
from pathlib import Path

from plumbline.data.paths import is_url
from plumbline.data.preparation.growing import append, merge
from plumbline.data.preparation.importing import TokenRequest, import_tokens
from plumbline.data.preparation.request import Request
from plumbline.data.preparation.upload import prepare_at
from plumbline.data.prepare import Result, prepare
from plumbline.data.sources import Sources

LOG = logging.getLogger(__name__)


def make(output: str, request: Request, staging: Path) -> Result:
    """Make a corpus in a local folder, or at a URL through the folder `staging`.

    Raises:
        ValueError: see `prepare` and `prepare_at`, as for OSError.
    """
    return prepare_at(output, request, staging) if is_url(output) else prepare(request)


def enlarge(
    output: str,
    sources: Sources,
    workers: int,
    shard_bytes: int | None,
    deduplicate: str | None,
    skip_bad: bool,
    reads_as_before: bool,
) -> Result:
    """Add the documents of more sources to a corpus.

    Raises:
        ValueError: the corpus is at a URL; see `append`, as for OSError.
    """
    return append(_folder(output), sources, workers, shard_bytes, deduplicate, skip_bad, reads_as_before)


def adopt(tokens: list[str], validation_tokens: list[str], tokenizer: str, output: str, overwrite: bool) -> Result:
    """Make a corpus of files of token ids, which another trainer's tools made with this tokenizer.

    Raises:
        ValueError: the output is at a URL; see `import_tokens`, as for OSError.
    """
    return import_tokens(TokenRequest(tokens, validation_tokens, tokenizer, _folder(output), overwrite))


def join(corpora: list[str], output: str, overwrite: bool) -> Result:
    """Merge several corpora into one, and warn if their splits do not combine well.

    Raises:
        ValueError: one of them is a URL; see `merge`, as for OSError.
    """
    result, warnings = merge([_folder(corpus, "--merge") for corpus in corpora], _folder(output), overwrite)
    for warning in warnings:
        LOG.warning(warning)
    return result


def _folder(path: str, option: str = "--output") -> Path:
    if is_url(path):
        raise ValueError(
            f"{option} {path}: --append, --merge and --tokens work on folders; copy it here, or upload what they make"
        )
    return Path(path)
