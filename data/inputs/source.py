"""Define what every kind of source answers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import Unit

KNOWN = "a file, a folder, a glob, hf:NAME or stdlib"
"""What --source may name, for messages."""


@dataclass(frozen=True)
class Source(ABC):
    """Read the text that one argument of --source names."""

    spec: str
    """The argument."""
    reading: Reading
    """How its rows and files become documents."""

    is_files: ClassVar[bool] = False
    """Whether its text is that of `files`, each read whole, so that two sources of one file hold a text twice."""

    @classmethod
    @abstractmethod
    def is_meant_by(cls, spec: str) -> bool:
        """Return whether an argument names a source of this kind, and none of the kinds before it in `KINDS`."""

    @property
    def name(self) -> str:
        """Return the argument, without differences that change nothing."""
        return self.spec

    def files(self) -> list[Path]:
        """Return the local files by which a change of its text shows, sorted; none by default.

        Raises:
            ValueError: it should name files, and names none.
        """
        return []

    @abstractmethod
    def units(self, number: int) -> Iterator[Unit]:
        """Yield its units in the order of the documents, the same at each call.

        Work that was interrupted goes by this order: a change of it needs another `request.WORK_FORMAT`.

        Args:
            number: index of the source in the request.

        Raises:
            ValueError: it names nothing that can be read.
            OSError: it cannot be reached at the moment.
        """

    def surprises(self) -> str:
        """Return what of its content is not read as one might expect, with counts and examples; "" by default."""
        return ""
