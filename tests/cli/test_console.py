"""What a terminal shows while experts are loaded."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from hotexperts.cli import console


def test_loading_shows_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, clock = io.StringIO(), [100.0]
    monkeypatch.setattr(
        console, "Console", lambda **_: Console(file=shown, force_terminal=True, width=120)
    )
    progress: Any = console.Progress
    monkeypatch.setattr(
        console,
        "Progress",
        lambda *columns, **how: progress(
            *columns, get_time=lambda: clock[0], auto_refresh=False, **how
        ),
    )
    with console.loading("loading experts") as tell:
        for second in range(5):
            clock[0] += 1
            tell(2_000_000_000 * second, 20_000_000_000)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert "loading experts" in text
    assert "8.0/20.0 GB" in text
    assert "2.0 GB/s" in text
    assert "0:00:06" in text
