"""Define paths in a configuration, local (`~` is the home folder) or URLs without secrets, and the user's cache."""

import os
import re
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator

HomePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path in a configuration, in which `~` is expanded since no shell does it. A URL stays as it is."""


def user_cache() -> Path:
    """Return the folder for this user's files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plumbline"


def last_part(path: str | os.PathLike[str]) -> str:
    """Return the last part of a path or URL: a link's own name, and for `.` the folder's name."""
    return os.path.basename(os.path.abspath(path))  # noqa: PTH100, PTH119 - Path.absolute() keeps ".."


def is_url(path: object) -> bool:
    """Return whether a path is a URL for fsspec, whose protocol may have capitals."""
    return re.match(r"[a-z][a-z0-9+.-]*://", str(path), re.IGNORECASE) is not None


def check_url(url: str) -> None:
    """Refuse a URL that contains a secret; the message does not repeat it.

    Raises:
        ValueError: it contains a user name, a password or a signature.
    """
    protocol, _, rest = url.partition("://")
    protocol = protocol.lower()
    # A password may hold a slash, so an @ counts anywhere after a colon, unless that is before a port
    has_password = ":" in rest.rpartition("@")[0] and not re.match(r"[^/:@]+:\d{1,5}/", rest)
    place = rest if has_password else rest.partition("/")[0]
    if ("@" in place and protocol != "hf") or "::" in url:
        host = re.split("[/?;#%]", place.rpartition("@")[2])[0]
        raise ValueError(
            f"{protocol}://...@{host}: a corpus's URL holds a user name or password (or is a chain of file systems), "
            "and would be logged; give them by fsspec's usual means, for example the environment variables of the "
            "provider, or ~/.config/fsspec"
        )
    # A web server is asked with whatever follows "?", which is a sign of a glob elsewhere
    if re.search("[?;#][^=]*=", unquote(rest)) or (protocol in ("http", "https") and "?" in rest):
        raise ValueError(
            f"{re.split('[?;#%]', url)[0]}?...: a corpus's URL holds a query, which may be a signature and would be "
            "logged; give credentials by fsspec's usual means"
        )


def leads_out(name: str) -> bool:
    """Return whether a name that a manifest gives to a file of its folder leads out of that folder."""
    return Path(name).is_absolute() or ".." in Path(name).parts
