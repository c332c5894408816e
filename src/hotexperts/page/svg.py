"""What drawings share: their frame, and texts in it."""

from __future__ import annotations

from collections.abc import Iterable

from hotexperts.page.document import escape

WIDTH, HEIGHT = 540, 290
TOP, BOTTOM = 12, 46  # left for what stands above and below


def drawing(parts: Iterable[str], label: str) -> str:
    """An SVG as wide as what it stands in; `label` is for those who cannot see it."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def text(x: float, y: float, said: str, anchor: str = "middle") -> str:
    """A line of text; `anchor` is which part of it is at x."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'


def upright(x: float, said: str) -> str:
    """A text from bottom to top, beside an axis."""
    y = (TOP + HEIGHT - BOTTOM) / 2
    turn = f'transform="rotate(-90 {x:g} {y:g})"'
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {turn}>{escape(said)}</text>'
