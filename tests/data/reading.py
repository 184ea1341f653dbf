"""Read sources to the end, as preparation does."""

import json
from collections import Counter

from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import HARMLESS, read_records
from plumbline.data.sources import Sources

TEXTS = ["first\n", "zweite Zeile\r\n", "第三"]


def read(
    *specs: object, text_key: str = "text", separator: str | None = None, template: str | None = None
) -> tuple[list[str], dict[str, int]]:
    """Return documents, and what is left out; an error for a record that is neither."""
    sources = Sources(tuple(map(str, specs)), Reading(text_key, separator, template))
    skipped: Counter[str] = Counter()
    texts = []
    for unit in sources.listed().units():
        for record in read_records(sources.reading, unit):
            if record.reason is not None:
                skipped[record.reason] += 1
                if record.reason not in HARMLESS:
                    raise ValueError(f"{record.where.format(line=record.number, row=record.number)}: {record.detail}")
            elif record.text is not None:
                texts.append(record.text)
    return texts, dict(skipped)


def json_lines(*texts: object, key: str = "text") -> bytes:
    return "".join(json.dumps({key: text, "id": 1}) + "\n" for text in texts).encode()
