"""Drawings as SVG, whose colours the page's style decides, so that they suit light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotexperts.page.document import Markup, escape
from hotexperts.page.numbers import number
from hotexperts.page.svg import BOTTOM, HEIGHT, TOP, WIDTH, drawing, text, upright

_LEFT, _RIGHT = 64, 16
_NUM_COLOURS = 8
_MOST_DOTS = 40
_LEAST = 1e-300  # below it the axis is that of nothing
_APART = 34  # marks of an axis
_STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 10.1)  # the last for what division loses


@dataclass(frozen=True, slots=True)
class Line:
    """A curve.

    Attributes:
        name: in the legend.
        points: x and y, from left to right.
        colour: of the style's, 0 to 7; more begin again.
        dashed: for a bound.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False

    @property
    def style(self) -> str:
        """The classes."""
        return f"s{self.colour % _NUM_COLOURS}" + (" dashed" if self.dashed else "")


@dataclass(frozen=True, slots=True)
class Axes:
    """What a chart's sides say.

    Attributes:
        x_label: below.
        y_label: on the left.
        x_ticks: where the lower side has marks; None spaces them evenly.
        y_most: the upper end; None takes the highest point's.
        right_label: on the right, of the same curves in another unit.
        right_factor: how many of those units are one of the left.
    """

    x_label: str
    y_label: str
    x_ticks: Sequence[float] | None = None
    y_most: float | None = None
    right_label: str = ""
    right_factor: float = 1.0


def line_chart(lines: Sequence[Line], axes: Axes, between: tuple[int, int] | None = None) -> Markup:
    """Curves over the same axes.

    Args:
        lines: one or more, each with a point.
        axes: their sides.
        between: two lines, the area between which is shaded.
    """
    xs = [x for line in lines for x, _ in line.points]
    top = axes.y_most or max((y for line in lines for _, y in line.points), default=0.0)
    right = WIDTH - (_LEFT if axes.right_label else _RIGHT)
    place = _Frame((min(xs), max(xs)), _round_up(top), right)
    parts = [*_grid(place, axes)]
    if between is not None:
        low, high = (place.corners(lines[at].points) for at in between)
        area = " ".join([*low, *reversed(high)])
        parts.append(f'<polygon class="gap" points="{area}"/>')
    for line in lines:
        corners = " ".join(place.corners(line.points))
        parts.append(f'<polyline class="{line.style}" points="{corners}"/>')
        if len(line.points) <= _MOST_DOTS:
            parts += (_dot(place, line, point) for point in line.points)
    return Markup(drawing(parts, axes.y_label) + _legend(lines))


class _Frame:
    """Where values are in the drawing."""

    def __init__(self, x_range: tuple[float, float], y_most: float, right: float) -> None:
        low, high = x_range
        aside = max(1.0, abs(low) / 1e6) if low == high else 0.0  # of a single point
        self.x_range = low - aside, high + aside
        self.y_most = y_most
        self.right = right

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (self.right - _LEFT) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / self.y_most

    def corners(self, points: Sequence[tuple[float, float]]) -> list[str]:
        return [f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points]


def _grid(place: _Frame, axes: Axes) -> list[str]:
    bottom = place.y(0)
    parts = []
    for value in _ticks(place.y_most):
        y = place.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{place.right}"/>')
        parts.append(text(_LEFT - 8, y + 4, number(value), "end"))
        if axes.right_label:
            said = number(value * axes.right_factor)
            parts.append(text(place.right + 8, y + 4, said, "start"))
    for value in _apart(place.x, axes.x_ticks or _between(*place.x_range)):
        x = place.x(value)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v5"/>')
        parts.append(text(x, bottom + 19, number(value), "middle"))
    parts.append(text((_LEFT + place.right) / 2, HEIGHT - 8, axes.x_label, "middle"))
    parts.append(upright(14, axes.y_label))
    if axes.right_label:
        parts.append(upright(WIDTH - 6, axes.right_label))
    return parts


def _apart(x: Callable[[float], float], values: Sequence[float]) -> list[float]:
    """The values whose marks do not touch."""
    kept: list[float] = []
    for value in values:
        if not kept or x(value) - x(kept[-1]) >= _APART:
            kept.append(value)
    return kept


def _dot(place: _Frame, line: Line, point: tuple[float, float]) -> str:
    x, y = point
    said = escape(f"{line.name}: {number(x)}, {number(y)}")
    return (
        f'<circle class="s{line.colour % _NUM_COLOURS} dot" cx="{place.x(x):.1f}" '
        f'cy="{place.y(y):.1f}" r="3.5"><title>{said}</title></circle>'
    )


def _legend(lines: Sequence[Line]) -> str:
    names = (f'<span><i class="{line.style}"></i>{escape(line.name)}</span>' for line in lines)
    return f'<div class="legend">{"".join(names)}</div>'


def _round_up(most: float) -> float:
    """A number with few digits that is not below this one."""
    if most < _LEAST:
        return 1.0
    unit: float = 10.0 ** math.floor(math.log10(most))
    return next(unit * step for step in _STEPS if most <= unit * step)


def _ticks(most: float) -> list[float]:
    return [most * part / 4 for part in range(5)]


def _between(low: float, high: float) -> list[float]:
    step = _round_up((high - low) / 6)
    first = math.ceil(low / step)
    return [step * at for at in range(first, math.floor(high / step) + 1)]
