"""What the commands do to the terminal: errors as one line, a progress bar, silence."""

from __future__ import annotations

import errno
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from hotexperts.errors import HotExpertsError

EXIT_DIFFERENT = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # what a shell gives a command that Ctrl-C ends
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NARROWEST = 80  # columns, for which tables are made
_LIBRARIES = ("torch", "transformers", "accelerate", "safetensors", "huggingface_hub")
_EXTRAS = {
    **dict.fromkeys(_LIBRARIES, "transformers"),
    "matplotlib": "plot",
    "prometheus_client": "metrics",
    **dict.fromkeys(("fastapi", "openai", "uvicorn"), "serve"),
    "gguf": "gguf",
}


@contextmanager
def errors_as_one_line(debug: bool) -> Iterator[None]:
    """Inside, errors that a user can act on become a line on stderr and exit status 2.

    Args:
        debug: show their traceback as well.
    """
    try:
        yield
    except Exception as error:
        if _is_interrupted(error):
            raise KeyboardInterrupt from error
        message = _message(error)
        if message is None:
            raise
        if debug:
            traceback.print_exc()
        show_error(message)
        raise typer.Exit(EXIT_ERROR) from None


def _is_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C came in an import that made an error of its own of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def show_error(message: object) -> None:
    """One line on stderr."""
    line = "error: " + " ".join(str(message).split())
    typer.echo(line.encode(errors="backslashreplace").decode(), err=True)


def note(message: str) -> None:
    """One line on stderr, of something that may surprise."""
    typer.echo(f"note: {message}", err=True)


def _message(error: Exception) -> str | None:
    """What to tell the user; None for what is a bug of ours."""
    if isinstance(error, HotExpertsError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)[:80]}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"{error.strerror} where the output goes: make room, or send it elsewhere"
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        if extra is not None:
            return (
                f"{error.name} is not installed: pip install -e '.[{extra}]' in the source folder"
            )
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        return (
            f"out of GPU memory ({str(error).splitlines()[0]}): "
            "lower --expert-cache-size, or use --device cpu"
        )
    return None


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, Transformers shows no bars and no warnings."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


@contextmanager
def loading(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, gone when done, and silence; yields what `load(progress=...)` wants."""
    bar = _bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with bar, quiet_libraries(), prints_to_stderr():
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, gone when done; call what it yields after each of the `total` pieces."""
    bar = _bar(MofNCompleteColumn(), TimeElapsedColumn())
    with bar, prints_to_stderr():
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _bar(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *columns)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def streaming() -> Iterator[Callable[[str], None]]:
    """Yields what puts a piece of text on stdout; where it breaks off, the line ends there.

    So whatever is said of it, an error above all, has a line of its own on a terminal.
    """
    is_line_open = False

    def emit(text: str) -> None:
        nonlocal is_line_open
        typer.echo(text, nl=False)
        is_line_open = not text.endswith("\n") if text else is_line_open

    try:
        yield emit
    except BaseException:  # Ctrl-C, too
        if is_line_open:
            typer.echo()
        raise


def prints_to_stderr() -> redirect_stdout[Any]:
    """Inside, what libraries and remote code print does not mix with our stdout."""
    return redirect_stdout(sys.stderr)


def show(renderable: RenderableType) -> None:
    """Something pretty on stdout: in a narrow terminal lines go on below, and no number is cut."""
    console = Console()
    console.width = max(console.width, _NARROWEST)
    console.print(renderable)


def show_json(data: dict[str, Any] | list[dict[str, Any]]) -> None:
    """One JSON object, or a list of them, on stdout, on one line."""
    typer.echo(json.dumps(data, allow_nan=False))
