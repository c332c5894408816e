"""Options that several commands share as one parameter: a dataclass in a signature is its fields.

    @groups.expanded
    def run(policy: Policy, expert_options: ExpertOptions, seed: Seed) -> None: ...

gives typer the options of `ExpertOptions` between `policy` and `seed`, and `run` what the command
line said of them, as an `ExpertOptions`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from typing import Any, NamedTuple, get_args, get_type_hints


class Without(NamedTuple):
    """In `Annotated[Group, Without("name", ...)]`: options of a group that a command has not.

    Attributes:
        names: of fields, which keep their defaults.
    """

    names: frozenset[str]


def without(*names: str) -> Without:
    """Leave these out of a group."""
    return Without(frozenset(names))


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each group in its signature as the options that are in it."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type, list[str]]] = {}
    shown: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        group, *extras = get_args(hint) or (hint,)
        if not is_dataclass(group):
            shown.append(parameter.replace(annotation=hint))
            continue
        assert isinstance(group, type)
        options = list(_options(group, {name for e in extras for name in e.names}))
        groups[parameter.name] = group, [option.name for option in options]
        shown += options

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, (group, names) in groups.items():
            given[name] = group(**{option: given.pop(option) for option in names})
        command(**given)

    call.__signature__ = signature(command).replace(parameters=shown)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in shown}
    return call


def _options(group: type, left_out: set[str]) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        if field.name not in left_out:
            yield Parameter(
                field.name,
                Parameter.POSITIONAL_OR_KEYWORD,
                default=field.default,
                annotation=hints[field.name],
            )
