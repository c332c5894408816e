"""What changed since an earlier benchmark, whose JSON is read; needs no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotexperts.errors import ConfigError
from hotexperts.fields import FieldError, Fields, read_fields

NAME = "hotexperts bench"  # what the field "benchmark" says
STARTS = ("cold", "warm")
_TIMES, _RATE = ("tokens_per_s", "prefill_ms"), "hit_rate"
_SAME = ("model", "num_layers", "num_experts", "dtype", "prompt_tokens", "steps", "routing")
_Place = tuple[int | None, int, str]  # slots, batch, start


def read_earlier(path: Path) -> Fields:
    """A result of `hotexperts bench --json`.

    Raises:
        FieldError: it is none, or cannot be read.
    """
    try:
        found = read_fields(path)
    except OSError as error:
        raise FieldError(
            f"--compare {path} cannot be read ({error.strerror}): give a file that "
            "`hotexperts bench --json` has printed"
        ) from error
    if isinstance(found, list) or "benchmark" not in found or found.text("benchmark") != NAME:
        raise FieldError(f"{path} is not what `hotexperts bench --json` prints: give such a file")
    return found


def check_same(earlier: Fields, now: Mapping[str, Any]) -> None:
    """Refuse to compare what measures something else.

    Raises:
        ConfigError: a setting differs; it is named, with both values.
    """
    for name in _SAME:
        if name in now and earlier.values.get(name) != now[name]:
            raise ConfigError(
                f"--compare {earlier.file}: {name} was {earlier.values.get(name)!r:.80}, now it is "
                f"{now[name]!r:.80}: compare the same"
            )


def changes(earlier: Fields, now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each cache, batch and start that both have, with each figure before and now.

    Raises:
        FieldError: a field of the earlier file is not what it should be.
    """
    before = _figures(earlier)
    current = _figures(Fields("this run", now))
    found = []
    for place in current:
        if place not in before:
            continue
        row: dict[str, Any] = dict(zip(("capacity", "batch", "start"), place, strict=True))
        for name in (*_TIMES, _RATE):
            old, new = before[place][name], current[place][name]
            row[name] = {"before": old, "now": new, "change": _change(old, new)}
        found.append(row)
    return found


def _figures(data: Fields) -> dict[_Place, dict[str, float | None]]:
    found: dict[_Place, dict[str, float | None]] = {}
    for row in data.parts("rows"):
        capacity = row.count("capacity") if "capacity" in row else None
        for start in STARTS:
            if start in row:
                part = row.part(start)
                place = capacity, row.count("batch"), start
                found[place] = {name: part.number(name) for name in _TIMES}
                found[place][_RATE] = part.rate_or_none(_RATE)
    return found


def _change(old: float | None, new: float | None) -> float | None:
    """In parts of the old value."""
    return None if old is None or new is None or not old else new / old - 1
