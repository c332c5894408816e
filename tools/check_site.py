"""Looks whether the built site is whole, and needs nobody else.

    python tools/check_site.py [FOLDER]

Every local link, picture, script and style of every page must be there, with its anchor. Nothing
but links to follow may lie on another host.
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).parent.parent / "site"


class Page(HTMLParser):
    """What a page needs.

    Attributes:
        anchors: names inside it.
        needed: (tag, address) of all it loads or links to.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {""}  # a page as a whole
        self.needed: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note its names and addresses."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.needed.append((tag, value))


def faults(site: Path = SITE) -> list[str]:
    """What is missing or lies elsewhere, a line each; empty where all is well."""
    pages = sorted(site.rglob("*.html"))
    if not pages:
        return [f"{site} holds no pages: build them with make docs"]
    return [fault for page in pages for fault in _of_page(page)]


def _of_page(page: Path) -> list[str]:
    found = []
    for tag, address in _read(page).needed:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            if tag != "a" and parts.scheme != "data":
                found.append(f"{page}: <{tag}> loads {address}")
            continue
        target = page.parent / unquote(parts.path) if parts.path else page
        if page.name == "404.html" and parts.path.startswith("/"):
            continue  # it is shown at any depth, so that it is told where the site begins
        if not target.exists():
            found.append(f"{page}: {address} is not there")
        elif target.suffix == ".html" and unquote(parts.fragment) not in _read(target).anchors:
            found.append(f"{page}: {address} has no such anchor")
    return found


@cache
def _read(page: Path) -> Page:
    return Page(page.read_text())


if __name__ == "__main__":
    lines = faults(Path(sys.argv[1]) if len(sys.argv) > 1 else SITE)
    sys.exit("\n".join(lines) or None)
