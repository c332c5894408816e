"""A matrix as a picture: one pixel a cell, which the browser enlarges."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt

from hotexperts.page.document import Markup
from hotexperts.page.svg import BOTTOM, HEIGHT, TOP, WIDTH, drawing, text, upright

_SCALE = ("#0b1026", "#2b3a8f", "#7a3fa8", "#c9496f", "#f08a3c", "#fbe58a")  # low to high
_LEFT, _KEY = 56, 92  # of the picture's sides


def heat_map(values: npt.NDArray[np.float64], x_label: str, y_label: str, unit: str) -> Markup:
    """Rows from top to bottom, a colour a value, and the scale beside them.

    Args:
        values: `[row, column]`, 0 or more.
        x_label: what columns are.
        y_label: what rows are.
        unit: of the values.
    """
    most = float(values.max()) or 1.0
    width, height = WIDTH - _LEFT - _KEY, HEIGHT - BOTTOM - TOP
    key = np.linspace(1, 0, 64)[:, None]
    parts = [
        _image(values / most, _LEFT, TOP, width, height),
        _image(key, WIDTH - _KEY + 16, TOP, 14, height),
        *_side_texts(values.shape, width, height),
        text(_LEFT + width / 2, HEIGHT - 8, x_label),
        upright(14, y_label),
        upright(WIDTH - 8, unit),
    ]
    for part in (0, 0.5, 1):
        x, y = WIDTH - _KEY + 36, TOP + 4 + height * (1 - part)
        parts.append(text(x, y, f"{most * part:.3g}", "start"))
    return Markup(drawing(parts, unit))


def _side_texts(shape: tuple[int, ...], width: float, height: float) -> list[str]:
    """The first and the last number of rows and columns."""
    num_rows, num_columns = shape
    row, column = height / num_rows, width / num_columns
    found = [
        text(_LEFT - 8, TOP + 4 + row / 2, "0", "end"),
        text(_LEFT + column / 2, TOP + height + 19, "0"),
    ]
    if num_rows > 1:
        found.append(text(_LEFT - 8, TOP + 4 + height - row / 2, str(num_rows - 1), "end"))
    if num_columns > 1:
        x = _LEFT + width - column / 2
        found.append(text(x, TOP + height + 19, str(num_columns - 1)))
    return found


def _image(parts: npt.NDArray[np.float64], x: float, y: float, width: float, height: float) -> str:
    data = base64.b64encode(png(_colours(parts))).decode()
    return (
        f'<image x="{x}" y="{y}" width="{width}" height="{height}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{data}"/>'
    )


def _colours(parts: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """`[row, column, 3]` from parts of 1."""
    anchors = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in _SCALE])
    at = np.linspace(0, 1, len(anchors))
    channels = [np.interp(parts, at, anchors[:, channel]) for channel in range(3)]
    found: npt.NDArray[np.uint8] = np.stack(channels, axis=-1).round().astype(np.uint8)
    return found


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG of `[row, column, 3]` red, green and blue (https://www.w3.org/TR/png-3/)."""
    height, width, _ = pixels.shape
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each begins with "no filter"
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
