"""What is a plain file: opening a pipe may wait for ever for whoever is at its other end."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from pathlib import Path

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def other_than_file(path: Path) -> str | None:
    """What is at a path instead of a plain file, such as "a pipe"; None for a file, or for nothing.

    Links are followed, and nothing is opened.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # who opens it says what is wrong
        return None
    return next((name for is_kind, name in _KINDS if is_kind(mode)), None)


def plain(path: Path) -> Path:
    """The path, if a plain file is there, or nothing: opening it does not wait for anyone.

    Raises:
        OSError: something else is there; its `strerror` says what.
    """
    kind = other_than_file(path)
    if kind is not None:
        number = errno.EISDIR if kind == "a folder" else errno.EINVAL
        raise OSError(number, f"{kind} is there, and a file was wanted", str(path))
    return path
