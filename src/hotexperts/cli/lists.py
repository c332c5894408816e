"""Values of options: several at once, by commas, spaces or repetition, or one of a few words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from hotexperts.config import Bytes, parse_bytes
from hotexperts.errors import ConfigError

HELP = "Separate several by commas, or repeat the option."


def option(help_: str, default: str, metavar: str = "LIST") -> Any:
    """An option that takes several values; `default` is shown in the help."""
    return typer.Option(metavar=metavar, help=f"{help_} {HELP}", show_default=default)


Batches = Annotated[
    list[str] | None, option("Sequences decoded together, such as 1,8.", default="1")
]


def joined(
    arguments: Sequence[str], options: Sequence[str], is_value: Callable[[str], bool]
) -> list[str]:
    """Arguments with `--batch 1 8` as `--batch 1,8`, which a parser takes for one value.

    Args:
        arguments: of a command, without its name.
        options: those that take lists.
        is_value: whether a word after a list's first value belongs to it.
    """
    found: list[str] = []
    in_list = False
    for place, word in enumerate(arguments):
        is_first = place > 0 and arguments[place - 1] in options
        if in_list and not is_first and is_value(word):
            found[-1] += f",{word}"
            continue
        in_list = is_first
        found.append(word)
    return found


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


def sizes(option: str, values: Sequence[str] | None) -> list[int | Bytes]:
    """Slots of a layer, or bytes of all layers, as in `--cache-size 16,6GiB`; none by default.

    Raises:
        ConfigError: nothing, or neither of the two.
    """
    found: list[int | Bytes] = []
    for text in split(option, values, ()):
        if not text[0].isdigit() or text.isdigit():
            found += numbers(option, [text], ())
            continue
        found.append(Bytes(parse_bytes(text)))
    return found


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a word that is none of a few.

    Raises:
        ConfigError: another word; the message lists them.
    """
    if value not in choices:
        raise ConfigError(f"{option} {value!r:.60}: give one of {', '.join(choices)}")
