"""Define paths in a configuration: local ones, where `~` is the home folder, or URLs without secrets."""

import os
import re
from typing import Annotated

from pydantic import AfterValidator

HomePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path in a configuration, in which `~` is expanded since no shell does it. A URL stays as it is."""


def last_part(path: str | os.PathLike[str]) -> str:
    """Return the last part of a path or URL: a link's own name, and for `.` the folder's name."""
    return os.path.basename(os.path.abspath(path))  # noqa: PTH100, PTH119 - Path.absolute() keeps ".."


def is_url(path: object) -> bool:
    """Return whether a path is a URL for fsspec."""
    return re.match(r"[a-z][a-z0-9+.-]*://", str(path)) is not None


def check_url(url: str) -> None:
    """Refuse a URL that contains a secret; the message does not repeat it.

    Raises:
        ValueError: it contains a user name, a password or a signature.
    """
    protocol, _, rest = url.partition("://")
    place = rest.partition("/")[0]
    if ("@" in place and protocol != "hf") or "::" in url:
        raise ValueError(
            f"{protocol}://...@{place.rpartition('@')[2]}: a corpus's URL holds a user name or password (or is a chain "
            "of file systems), and would be logged; give them by fsspec's usual means, for example the environment "
            "variables of the provider, or ~/.config/fsspec"
        )
    if "?" in url and "=" in url.partition("?")[2]:
        raise ValueError(
            f"{url.partition('?')[0]}?...: a corpus's URL holds a query, which may be a signature and would be logged; "
            "give credentials by fsspec's usual means"
        )
