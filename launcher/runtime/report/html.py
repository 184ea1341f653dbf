"""Write self-contained pages: facts, tables, and groups of figures, each with a one-line explanation."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

START = '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="generator" content="Plumbline">'
STYLE = """
body { font: 15px/1.45 sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1.2rem; color: #222 }
h1 { margin: 0 } h2 { margin: 2.4rem 0 .2rem; border-bottom: 1px solid #ccc } h3 { margin: 1.4rem 0 .3rem }
p { margin: .3rem 0 .8rem; max-width: 52rem } a { color: #1b5e9e } nav a { margin-right: 1.1em }
table { border-collapse: collapse; font-size: 14px } .wide { overflow-x: auto }
td, th { padding: .16rem .55rem; text-align: left; vertical-align: top }
thead th { border-bottom: 1px solid #999; vertical-align: bottom } tbody tr + tr { border-top: 1px solid #eee }
th:first-child, td:first-child { padding-left: 0 }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.facts th { font-weight: normal; color: #666; white-space: nowrap }
td { overflow-wrap: anywhere } .wide td { overflow-wrap: normal }
code, pre { font: 13px/1.4 monospace } pre { white-space: pre-wrap; background: #f6f6f6; padding: .6rem .8rem }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2rem 2rem } figure { margin: 0 }
.figures .full { grid-column: 1 / -1 } figcaption { margin-bottom: .2rem } img { max-width: 100%; display: block }
.figures figure { display: flex; flex-direction: column } figure img { margin-top: auto }
.quiet { color: #666 } .last { float: right; color: #444 } .alert { color: #a00 } li { margin: .15rem 0 }
.key { display: inline-block; width: 1.6em; height: .35em; vertical-align: middle; margin-right: .5em }
@media (max-width: 46rem) { .figures { grid-template-columns: 1fr } }
@media print { body { font-size: 10.5pt; max-width: none; margin: 0 } nav { display: none }
  figure, tr, li, pre { break-inside: avoid } h2, h3, h2 + p, h3 + p { break-after: avoid } a { color: inherit } }
"""


@dataclass(frozen=True)
class Figure:
    """Hold one picture and what it means."""

    title: str
    text: str
    """What it means, in one line."""
    image: bytes
    """PNG file."""
    key: str = ""
    """Key in metrics.jsonl of what it shows."""
    last: str = ""
    """The last value."""
    full: bool = False
    """Whether to use the full width of the page instead of half."""


@dataclass(frozen=True)
class Group:
    """Hold figures that belong together."""

    title: str
    text: str
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Swatch:
    """Hold a cell with its colour in figures."""

    text: str
    colour: str


@dataclass(frozen=True)
class Shaded:
    """Hold a cell that is darker the more it stands out."""

    text: str
    darkness: float
    """0 to 1."""


Cell = str | Swatch | Shaded


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page."""
    return f"{START}<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"


def heading(title: str, text: str = "") -> str:
    """Return the heading of a section, to which `contents` links, and its introduction."""
    return f'<h2 id="{_name(title)}">{escape(title)}</h2>' + (f"<p>{escape(text)}</p>" if text else "")


def contents(titles: Iterable[str]) -> str:
    """Return links to the sections of a page."""
    return f"<nav>{''.join(link(title, title) for title in titles)}</nav>"


def link(text: str, title: str) -> str:
    """Return a link to the section with this title."""
    return f'<a href="#{_name(title)}">{escape(text)}</a>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and facts."""
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]], words: int = 1) -> str:
    """Return a table whose first `words` columns are words and the others numbers."""

    def cell(tag: str, number: int, content: Cell) -> str:
        side = "" if number < words else ' class="number"'
        shade = f' style="background:rgb(200 60 20/{content.darkness / 2:.0%})"' if isinstance(content, Shaded) else ""
        return f"<{tag}{side}{shade}>{_cell(content)}</{tag}>"

    head = "".join(cell("th", number, name) for number, name in enumerate(header))
    body = "".join(f"<tr>{''.join(cell('td', number, each) for number, each in enumerate(row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def group(content: Group) -> str:
    """Return figures side by side under their heading."""
    figures = "".join(map(figure, content.figures))
    return f'{heading(content.title, content.text)}<div class="figures">{figures}</div>'


def figure(content: Figure) -> str:
    """Return one figure with its text above it."""
    last = f'<span class="last">{escape(content.last)}</span>' if content.last else ""
    key = f" <code>{escape(content.key)}</code>" if content.key else ""
    width = ' class="full"' if content.full else ""
    source = f"data:image/png;base64,{base64.b64encode(content.image).decode()}"
    return (
        f"<figure{width}><figcaption>{last}<strong>{escape(content.title)}</strong>{key}"
        f'<br><span class="quiet">{escape(content.text)}</span></figcaption>'
        f'<img alt="{escape(content.title)}" src="{source}"></figure>'
    )


def _cell(content: Cell) -> str:
    if isinstance(content, Swatch):
        return f'<span class="key" style="background:{escape(content.colour)}"></span>{escape(content.text)}'
    return escape(content if isinstance(content, str) else content.text)


def _name(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())
