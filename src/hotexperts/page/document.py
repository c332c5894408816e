"""The page's frame and its plain parts; whatever is not `Markup` is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
<footer>{footer}</footer>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is HTML already."""

    text: str


Text = str | Markup


@dataclass(frozen=True, slots=True)
class Page:
    """What a page holds.

    Attributes:
        title: its heading.
        parts: from top to bottom.
    """

    title: str
    parts: Sequence[Markup]

    def render(self, footer: str) -> bytes:
        """The file's content; half characters, which JSON can name, become references."""
        page = _PAGE.format(
            title=escape(self.title),
            style=files("hotexperts.page").joinpath("style.css").read_text(),
            body="\n".join(part.text for part in self.parts),
            footer=escape(footer),
        )
        return page.encode("utf-8", errors="xmlcharrefreplace")


def escape(text: Text) -> str:
    """As HTML, in elements and in quoted attributes."""
    return text.text if isinstance(text, Markup) else html.escape(text)


def section(title: str, *parts: Markup, note: str = "") -> Markup:
    """A heading, a line below it, and what belongs to it."""
    said = f"<p>{escape(note)}</p>\n" if note else ""
    inside = "\n".join(part.text for part in parts)
    return Markup(f"<section>\n<h2>{escape(title)}</h2>\n{said}{inside}\n</section>")


def side_by_side(*parts: Markup) -> Markup:
    """As many beside each other as the window has room for."""
    return Markup(f'<div class="row">{"".join(part.text for part in parts)}</div>')


def figure(title: str, drawing: Markup, *parts: Markup) -> Markup:
    """A drawing below its title, and its legend."""
    inside = drawing.text + "".join(part.text for part in parts)
    return Markup(f"<figure><figcaption>{escape(title)}</figcaption>{inside}</figure>")


def facts(pairs: Iterable[tuple[str, Text]]) -> Markup:
    """Names and what they are."""
    lines = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return Markup(f"<dl>{''.join(lines)}</dl>")


def table(names: Sequence[str], rows: Iterable[Sequence[Text]], num_texts: int = 1) -> Markup:
    """A table.

    Args:
        names: of the columns.
        rows: their cells.
        num_texts: columns from the left that hold text; the others hold numbers.
    """

    def line(cells: Sequence[Text], kind: str) -> str:
        sides = ['class="text"' if at < num_texts else "" for at in range(len(cells))]
        inside = (
            f"<{kind} {side}>{escape(cell)}</{kind}>".replace(" >", ">")
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(inside)}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return Markup(
        f'<div class="wide"><table>\n<thead>{line(names, "th")}</thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def bar(part: float | None) -> Markup:
    """A bar in a table's cell, of a part of 1."""
    width = 100 * min(max(part or 0.0, 0.0), 1.0)
    return Markup(f'<span class="bar"><span style="width:{width:.1f}%"></span></span>')
