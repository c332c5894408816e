"""Pages without a browser: well formed, escaped, and numbers where they belong."""

from __future__ import annotations

import html.parser
import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotexperts.page.charts import Axes, Line, line_chart
from hotexperts.page.document import Markup, Page, bar, facts, section, table
from hotexperts.page.heat import heat_map, png
from hotexperts.page.of_sweep import policy_colours

EVIL = "</title><script>alert('x')</script>\"' onload=\"a&b"
VOID = {"meta"}


class Checker(html.parser.HTMLParser):
    """Fails where an element is not closed; keeps elements, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def checked(page: str) -> Checker:
    found = Checker()
    found.feed(page)
    found.close()
    assert found.open == []
    return found


def assert_needs_nothing(found: Checker) -> None:
    """No script, no handler, and nothing that a browser would fetch."""
    names = {tag for tag, _ in found.elements}
    assert names.isdisjoint({"script", "link", "iframe", "object", "form", "base"})
    for _, attributes in found.elements:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "action"):
            assert (attributes.get(name) or "data:image/png;base64,").startswith("data:image/png")


@given(text=st.one_of(st.text(), st.just(EVIL)))
def test_text_is_text_wherever_it_stands(text: str) -> None:
    chart = line_chart([Line(text, [(0, 1), (1, 2)], 0)], Axes(text, text))
    heat = heat_map(np.ones((1, 1)), text, text, text)
    parts = [facts([(text, text)]), table([text], [[text]]), chart, heat]
    page = Page(text, [section(text, *parts, note=text)]).render(text).decode()
    found = checked(page)
    assert_needs_nothing(found)
    if text == EVIL:
        assert found.texts.count(EVIL) >= 10


def test_half_characters_do_not_stop_a_page() -> None:
    page = Page("a\ud800b", []).render("")
    assert b"a&#55296;b" in page


def test_points_are_where_their_numbers_say() -> None:
    drawn = line_chart([Line("a", [(0, 0), (5, 50), (10, 100)], 2)], Axes("x", "y", y_most=100))
    points = re.search(r'<polyline class="s2" points="([^"]+)"', drawn.text)
    assert points is not None
    (x0, y0), (x1, y1), (x2, y2) = (map(float, p.split(",")) for p in points[1].split())
    assert (x1, y1) == pytest.approx(((x0 + x2) / 2, (y0 + y2) / 2), abs=0.11)
    assert x0 < x2
    assert y0 > y2, "up is less in a drawing"
    assert 'text-anchor="end">25</text>' in drawn.text
    assert "<title>a: 5, 50</title>" in drawn.text


def test_the_right_side_is_another_unit_of_the_same() -> None:
    axes = Axes("x", "y", y_most=8, right_label="MiB", right_factor=3)
    drawn = line_chart([Line("a", [(0, 1), (1, 2)], 0)], axes).text
    left, right = (re.findall(rf'"{side}">([^<]+)</text>', drawn) for side in ("end", "start"))
    assert (left, right) == (["0", "2", "4", "6", "8"], ["0", "6", "12", "18", "24"])


@pytest.mark.parametrize("points", [[(3, 0)], [(3, 0), (3, 0)], [(0, 0), (9, 0)]])
def test_a_chart_of_nothing_much(points: list[tuple[float, float]]) -> None:
    drawn = line_chart([Line("a", points, 0)], Axes("x", "y")).text
    assert "nan" not in drawn
    assert "inf" not in drawn


@given(most=st.floats(1e-9, 1e15))
def test_an_axis_ends_above_its_highest_point(most: float) -> None:
    drawn = line_chart([Line("a", [(0, most), (1, most)], 0)], Axes("x", "y")).text
    points = re.search(r'points="([^"]+)"', drawn)
    assert points is not None
    assert float(points[1].split()[0].split(",")[1]) >= 11.9  # not above the drawing's frame


def test_a_picture_holds_its_pixels() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    data = png(pixels)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (3, 2)
    begin = data.index(b"IDAT")
    (size,) = struct.unpack(">I", data[begin - 4 : begin])
    lines = zlib.decompress(data[begin + 4 : begin + 4 + size])
    assert lines == bytes([0, *range(9), 0, *range(9, 18)])
    (crc,) = struct.unpack(">I", data[begin + 4 + size : begin + 8 + size])
    assert crc == zlib.crc32(data[begin : begin + 4 + size])


def test_a_heat_map_of_nothing() -> None:
    assert "nan" not in heat_map(np.zeros((2, 3)), "x", "y", "unit").text


def test_the_first_and_the_last_row_and_column_are_numbered() -> None:
    drawn = heat_map(np.ones((12, 64)), "x", "y", "unit").text
    assert re.findall(r">(\d+)</text>", drawn)[:4] == ["0", "0", "11", "63"]


def test_lru_and_belady_look_the_same_everywhere() -> None:
    assert policy_colours(["adv", "belady", "lru", "lfu"]) == {
        "lru": 0,
        "belady": 1,
        "adv": 2,
        "lfu": 3,
    }


def test_a_bar_stays_in_its_cell() -> None:
    assert [re.findall(r"width:([\d.]+)%", bar(part).text) for part in (None, 0.25, 7.0)] == [
        ["0.0"],
        ["25.0"],
        ["100.0"],
    ]


def test_markup_is_not_escaped_twice() -> None:
    assert "<td><b>x</b></td>" in table(["a", "b"], [["y", Markup("<b>x</b>")]]).text
