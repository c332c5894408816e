"""Values of options: several at once, by commas or by repetition, or one of a few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from hotexperts.errors import ConfigError

HELP = "Separate several by commas, or repeat the option."


def option(help_: str, default: str, metavar: str = "LIST") -> Any:
    """An option that takes several values; `default` is shown in the help."""
    return typer.Option(metavar=metavar, help=f"{help_} {HELP}", show_default=default)


Batches = Annotated[
    list[str] | None, option("Sequences decoded together, such as 1,8.", default="1")
]


def split(option: str, values: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """The values of an option that takes commas and may be repeated, each once.

    Raises:
        ConfigError: the option is given, with nothing in it.
    """
    if not values:
        return list(default)
    found = [part.strip() for value in values for part in value.split(",") if part.strip()]
    if not found:
        raise ConfigError(
            f"{option} is empty: list {','.join(default) or '16,32'}, or leave it out"
        )
    return list(dict.fromkeys(found))


def numbers(option: str, values: Sequence[str] | None, default: Sequence[int]) -> list[int]:
    """The same for whole numbers.

    Raises:
        ConfigError: nothing, or no number.
    """
    found = split(option, values, [str(number) for number in default])
    for text in found if values else ():
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ConfigError(f"{option} {text!r:.60}: give whole numbers, such as 8,16")
    return list(dict.fromkeys(int(text) for text in found))


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a word that is none of a few.

    Raises:
        ConfigError: another word; the message lists them.
    """
    if value not in choices:
        raise ConfigError(f"{option} {value!r:.60}: give one of {', '.join(choices)}")
