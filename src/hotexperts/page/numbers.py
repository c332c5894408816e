"""Numbers as pages and reports show them; what is not known is a dash."""

from __future__ import annotations

from hotexperts.config import format_bytes

UNKNOWN = "-"


def percent(part: float | None) -> str:
    """A part of 1."""
    return UNKNOWN if part is None else f"{100 * part:.1f} %"


def nbytes(num_bytes: float | None) -> str:
    """Bytes."""
    return UNKNOWN if num_bytes is None else format_bytes(int(num_bytes))


def number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
