"""Read pages as a program can."""

import base64
import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """Collect what is on a page, and whatever it would have to load."""

    def __init__(self, text: str) -> None:
        """Read a page."""
        super().__init__()
        self.images: list[bytes] = []
        self.outside: list[str] = []
        self.titles: list[str] = []
        """Of its parts, in order."""
        self.figures: list[str] = []
        """Titles of its figures."""
        self.keys: list[str] = []
        """Numbers of metrics.jsonl that have a figure."""
        self.facts: dict[str, str] = {}
        """Name -> text, of tables of facts."""
        self._inside: list[str] = []
        self._name = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag loads, and where it begins."""
        if tag not in ("meta", "img", "br"):
            self._inside.append(tag)
        for name, value in attrs:
            if name in ("src", "href") and value is not None and not value.startswith("#"):
                found = re.fullmatch(r"data:image/png;base64,(.+)", value)
                if found:
                    self.images.append(base64.b64decode(found[1]))
                else:
                    self.outside.append(value)

    def handle_endtag(self, tag: str) -> None:
        """Leave a tag."""
        assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note text by the tag that it stands in."""
        tag = self._inside[-1] if self._inside else ""
        if tag == "h2":
            self.titles.append(data)
        elif tag == "strong":
            self.figures.append(data)
        elif tag == "code" and "figcaption" in self._inside:
            self.keys.append(data)
        elif tag == "th" and "thead" not in self._inside:
            self._name = data
        elif tag == "td" and self._name:
            self.facts[self._name] = data
            self._name = ""
