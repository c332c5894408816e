"""JSON that others wrote, read field by field: what is wrong is named with its file and place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hotexperts.errors import HotExpertsError
from hotexperts.plain_file import plain

_MOST_BYTES = 64 << 20
_MOST_COUNT = 2**63
_GIVE = "give what a command's --json printed, as it is"


class FieldError(HotExpertsError, ValueError):
    """A JSON file is not what it should be; the message names the file and the field."""


@dataclass(frozen=True, slots=True)
class Fields:
    """One object of a JSON file.

    Every method raises `FieldError` for a field that is missing, or is not what its name says.

    Attributes:
        file: named in errors.
        values: the object's.
        place: of the object in the file, such as "rows[2].warm"; empty for the whole.
    """

    file: str
    values: Mapping[str, Any]
    place: str = ""

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def text(self, name: str) -> str:
        """Characters."""
        value = self._value(name)
        return value if isinstance(value, str) else self.refuse(name, "text")

    def texts(self, name: str) -> list[str]:
        """A list of them."""
        values = self._value(name)
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            self.refuse(name, "a list of texts")
        return values

    def count(self, name: str) -> int:
        """A whole number, 0 or more."""
        value = self._value(name)
        if type(value) is not int or not 0 <= value < _MOST_COUNT:
            self.refuse(name, "a whole number, 0 or more")
        return value

    def number(self, name: str) -> float:
        """A number, 0 or more."""
        value = self._value(name)
        if type(value) not in (int, float) or not 0 <= value < _MOST_COUNT:
            self.refuse(name, "a number, 0 or more")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A number, 0 or more; None where it is null or missing."""
        return self.number(name) if name in self else None

    def signed_or_none(self, name: str) -> float | None:
        """Any number; None where it is null or missing."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            self.refuse(name, "a number or null")
        return float(value)

    def rate_or_none(self, name: str) -> float | None:
        """0 to 1; None where it is null or missing."""
        rate = self.number_or_none(name)
        return rate if rate is None or rate <= 1 else self.refuse(name, "a part of 1, or null")

    def part(self, name: str) -> Fields:
        """An object inside."""
        value = self._value(name)
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(self.file, value, self._place(name))

    def parts(self, name: str) -> list[Fields]:
        """The objects of a list inside, at least one."""
        return _objects(self.file, self._value(name), self._place(name))

    def refuse(self, name: str, wanted: str) -> NoReturn:
        """Say that a field is not what was wanted.

        Raises:
            FieldError: always.
        """
        shown = f"{self.values.get(name)!r:.60}"
        raise FieldError(
            f"{self.file}: field {self._place(name)!r}: {shown}: {wanted} was wanted: {_GIVE}"
        )

    def _value(self, name: str) -> Any:
        if name not in self.values:
            raise FieldError(f"{self.file}: field {self._place(name)!r}: missing: {_GIVE}")
        return self.values[name]

    def _place(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name


def read_fields(path: Path) -> Fields | list[Fields]:
    """A JSON file that holds an object, or a list of objects.

    Raises:
        FieldError: too large, no JSON, or something else.
        OSError: it cannot be read.
    """
    if plain(path).stat().st_size > _MOST_BYTES:
        raise FieldError(f"{path} has over {_MOST_BYTES >> 20} MiB, as no report has: {_GIVE}")
    try:
        found = json.loads(path.read_bytes().decode("utf-8-sig"), parse_constant=_no_number)
    except RecursionError:
        raise FieldError(f"{path} is no JSON (it is nested too deeply): {_GIVE}") from None
    except ValueError as error:
        raise FieldError(f"{path} is no JSON ({error}): {_GIVE}") from error
    if isinstance(found, dict):
        return Fields(str(path), found)
    return _objects(str(path), found, "")


def _objects(file: str, values: Any, place: str) -> list[Fields]:
    if not isinstance(values, list) or not values:
        raise FieldError(f"{file}: {_named(place)}: a list with objects in it was wanted: {_GIVE}")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            where = f"{place}[{index}]"
            raise FieldError(
                f"{file}: field {where!r}: {value!r:.60}: an object was wanted: {_GIVE}"
            )
    return [Fields(file, value, f"{place}[{index}]") for index, value in enumerate(values)]


def _named(place: str) -> str:
    return f"field {place!r}" if place else "the whole file"


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")
