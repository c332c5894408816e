"""Words with numbers, and where in `bench/results/` the numbers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from result_tables import load


class Value(NamedTuple):
    """A number in a sentence.

    Attributes:
        field: where in the result it is, for readers.
        find: the number in the result.
        shown: how the README writes it.
    """

    field: str
    find: Callable[[Any], Any]
    shown: str = "{}"


class Claim(NamedTuple):
    """Words of a page with `{}` for each value, and the result that holds them."""

    said: str
    result: str
    values: tuple[Value, ...]

    def rendered(self) -> str:
        """The words as the result would have them."""
        data = load(self.result)
        return self.said.format(*(v.shown.format(v.find(data)) for v in self.values))


def field(path: str, shown: str = "{}", scale: float | None = None) -> Value:
    """A value at keys that slashes separate, times `scale`."""

    def find(data: Any) -> Any:
        for key in path.split("/"):
            data = data[key]
        return data if scale is None else data * scale

    return Value(path, find, shown)


def expert_nbytes(data: Any) -> int:
    """Three matrices in bf16."""
    shape = data["shape"]
    return int(3 * 2 * shape["hidden_size"] * shape["moe_intermediate_size"])


def all_experts_nbytes(data: Any) -> int:
    shape = data["shape"]
    return int(shape["num_hidden_layers"] * shape["num_experts"] * expert_nbytes(data))


def short_version(name: str) -> Value:
    """Major and minor of a library."""

    def find(data: Any) -> str:
        return ".".join(data["machine"]["versions"][name].split(".")[:2])

    return Value(f"machine/versions/{name}", find)
