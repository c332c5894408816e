"""What a terminal shows while experts are loaded."""

from __future__ import annotations

import errno
import io
import re
from typing import Any

import pytest
import typer
from rich.console import Console
from rich.table import Table

from hotexperts.cli import console
from hotexperts.errors import HotExpertsError


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


def test_a_full_disk_at_the_other_end_of_stdout_is_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ended, console.errors_as_one_line(debug=False):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert ended.value.exit_code == 2
    assert capfd.readouterr().err == (
        "error: No space left on device where the output goes: make room, or send it elsewhere\n"
    )


def test_a_closed_pipe_stays_what_it_is() -> None:
    with pytest.raises(BrokenPipeError), console.errors_as_one_line(debug=False):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("link", ["cause", "context"])
def test_ctrl_c_that_an_import_made_an_error_of_is_ctrl_c(link: str) -> None:
    error = HotExpertsError("cannot import")
    setattr(error, f"__{link}__", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), console.errors_as_one_line(debug=False):
        raise error


def test_a_narrow_terminal_cuts_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    table = Table("slots", "tokens a second")
    table.columns[1].no_wrap = True
    table.add_row("12 of 128", "1234567.8 tokens/s")
    console.show(table)
    assert "1234567.8 tokens/s" in capsys.readouterr().out
