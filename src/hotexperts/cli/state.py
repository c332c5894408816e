"""A cache that goes on where it was, and is saved at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hotexperts.cli import console

if TYPE_CHECKING:
    from hotexperts.integrations.transformers.handle import ExpertCache


@contextmanager
def kept(cache: ExpertCache, path: Path | None) -> Iterator[None]:
    """Inside, the cache goes on from the file; what it then knows is saved, whatever happens."""
    if path is None:
        yield
        return
    if path.exists():
        cache.load_state(path)
        console.note(f"the cache starts as {path} says")
    else:
        console.note(f"no {path} yet: the cache starts empty")
    try:
        yield
    finally:
        cache.save_state(path)
        console.note(f"saved for the next start: {path}")
