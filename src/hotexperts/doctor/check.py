"""One finding about a machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Status(str, Enum):
    """GREEN is as it should be, YELLOW works but costs, RED keeps something from working."""

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


@dataclass(frozen=True, slots=True)
class Check:
    """A finding.

    Attributes:
        name: what was looked at.
        status: the judgement.
        found: what there is, for people.
        remedy: what to do about it; only where the status is not GREEN.
        values: what there is, for machines: numbers with their units in the names.
    """

    name: str
    status: Status
    found: str
    remedy: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"status": self.status.value}


def worst(checks: list[Check]) -> Status:
    """The status of all together; GREEN for none."""
    order = list(Status)
    return max((check.status for check in checks), key=order.index, default=Status.GREEN)
