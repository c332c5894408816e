"""A model's configuration, of whose values each is checked as it is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotexperts.errors import CheckpointError
from hotexperts.plain_file import plain

_MOST_BYTES = 64 << 20


class Config:
    """A configuration; that of its text part where it has several.

    Attributes:
        place: the file, for errors.
        values: by name.
    """

    def __init__(self, place: str, values: Mapping[str, Any]) -> None:
        text = values.get("text_config")
        self.place = place
        self.values: dict[str, Any] = {**values, **(text if isinstance(text, dict) else {})}

    def first(self, names: tuple[str, ...]) -> int | None:
        """The first of these that is there, at least 1."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is not int or not 1 <= value < 2**31:
                raise CheckpointError(
                    f"{self.place}: {name} is {value!r:.60}: a count was wanted: download it again"
                )
            return value
        return None

    def count(self, *names: str) -> int:
        """A number that must be there."""
        found = self.first(names)
        if found is None:
            raise CheckpointError(f"{self.place} has no {' or '.join(names)}: download it again")
        return found


def read_config(path: Path) -> Config:
    """A `config.json`.

    Raises:
        CheckpointError: it cannot be read, or holds no object.
    """
    return Config(str(path), read_object(path))


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
        CheckpointError: it cannot be read, is too large, or holds something else.
    """
    try:
        if plain(path).stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{path} has over {_MOST_BYTES >> 20} MiB: download it again")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}: name a file that can be read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON ({error}): download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object: download it again")
    return values
