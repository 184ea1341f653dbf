"""List the kinds of sources. A new one needs a file like those imported here, and a line below."""

from plumbline.data.inputs.dataset import Dataset
from plumbline.data.inputs.folder import Folder
from plumbline.data.inputs.named import NamedFiles
from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.source import Source
from plumbline.data.inputs.stdlib import StandardLibrary

KINDS: tuple[type[Source], ...] = (Dataset, StandardLibrary, Folder, NamedFiles)
"""The first that is meant by an argument of --source reads it."""


def source_of(spec: str, reading: Reading) -> Source:
    """Return the source that an argument of --source names."""
    return next(kind(spec, reading) for kind in KINDS if kind.is_meant_by(spec))
