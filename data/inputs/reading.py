"""State how rows and files of text become documents."""

import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Reading:
    """State how rows and files of text become documents."""

    text_key: str = "text"
    """The field or column of a row that holds the text; a.b is field b of field a."""
    document_separator: str | None = None
    """Separator that cuts plain-text files into documents, or None for one document per file."""
    template: str | None = None
    """Template that makes the text of a row from its fields, named in braces, or None for the field `text_key`
    alone."""

    def __post_init__(self) -> None:
        """Check the separator and the template.

        Raises:
            ValueError: the separator is empty, or the template names no field or uses more than plain fields.
        """
        if self.document_separator == "":
            raise ValueError("--document-separator is empty; leave it out to make each file one document")
        if self.template is None:
            return
        try:
            parts = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise ValueError(f"--text-template {self.template!r}: {error}; write {{{{ for a brace") from error
        named = [part for part in parts if part[1] is not None]
        if not named or any(
            not (field or "").isidentifier() or form or conversion for _, field, form, conversion in named
        ):
            raise ValueError(
                f"--text-template {self.template!r}: expected names of fields in braces and nothing else in "
                "them, as in '{title}\\n\\n{text}'"
            )

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Return the fields of a row from which the text is made."""
        if self.template is None:
            return (self.text_key.partition(".")[0],)
        return tuple(dict.fromkeys(field for _, field, _, _ in string.Formatter().parse(self.template) if field))

    def options(self) -> dict[str, Any]:
        """Return the options for a request; those newer than the format appear only if they are used."""
        always = {"text_key": self.text_key, "document_separator": self.document_separator}
        return always if self.template is None else {**always, "text_template": self.template}


def readings_of(request: Mapping[str, Any]) -> Iterator[Reading]:
    """Yield how a corpus of this request, or each part of a merged one, was read (see `Reading.options`)."""
    if parts := request.get("merged"):
        for part in parts:
            yield from readings_of(part["request"])
    else:
        yield Reading(request.get("text_key", "text"), request.get("document_separator"), request.get("text_template"))


def unescaped(text: str | None) -> str | None:
    r"""Return a separator or a template with the escapes \n, \r, \t and \\ of the command line replaced."""
    meant = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
    return None if text is None else re.sub(r"\\([nrt\\])", lambda found: meant[found[1]], text)
