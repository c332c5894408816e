"""Plug-ins by name: `Registry[T]` maps a name to a class that is imported only when asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from hotexperts.errors import ConfigError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to classes, imported late, so that naming one costs nothing.

    Args:
        kind: what is registered, for messages ("policy").
        base: the class that every registered class must extend.
        entries: name to `"module:Class"`.
        elsewhere: names of what is not registered but known, and why it is not here.
    """

    def __init__(
        self,
        kind: str,
        base: type[T],
        entries: dict[str, str],
        elsewhere: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._kind = kind
        self._base = base
        self._entries = dict(entries)
        self._elsewhere = elsewhere

    def names(self) -> tuple[str, ...]:
        """The registered names, sorted."""
        return tuple(sorted(self._entries))

    def register(self, name: str, target: str) -> None:
        """Add a name.

        Raises:
            ConfigError: the name is taken.
        """
        if name in self._entries or name in self._elsewhere:
            raise ConfigError(f"{self._kind} {name!r} is already registered: choose another name")
        self._entries[name] = target

    def load(self, name: str) -> type[T]:
        """The class registered as `name`, or the one at `"module:Class"`.

        Raises:
            UnknownNameError: no such name, module or class; the message lists the names.
            ConfigError: not a name, or the class does not extend the base or leaves methods out.
        """
        if not isinstance(name, str):
            raise ConfigError(f"{self._kind} is {name!r}: give a name, such as {self.names()[0]!r}")
        target = self._entries.get(name, name if ":" in name else None)
        if target is None and name in self._elsewhere:
            raise UnknownNameError(
                f"{self._kind} {name!r} {self._elsewhere[name]}: choose one of "
                f"{', '.join(self.names())}"
            )
        if target is None:
            raise UnknownNameError(
                f"unknown {self._kind} {name!r}: choose one of {', '.join(self.names())}, "
                "or give 'module:Class'"
            )
        module_name, _, class_name = target.partition(":")
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except Exception as error:  # the module is the user's, and may raise anything
            raise UnknownNameError(
                f"cannot load {self._kind} {name!r} ({type(error).__name__}: {error}): mend it, or "
                f"choose one of {', '.join(self.names())}"
            ) from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigError(f"{name!r} is not a {self._base.__name__}: it must extend it")
        if inspect.isabstract(found):
            missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            raise ConfigError(f"{self._kind} {name!r} is abstract: it must define {missing}")
        return found
