"""What the rows of the banks hold, and the parts in which a prefill streams through them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from hotexperts.types import Placement

NUM_BANKS = 2
Held: TypeAlias = "tuple[int, int] | None"  # a layer and one of its experts


@dataclass(frozen=True, slots=True)
class BankPart:
    """Experts that one bank serves at once.

    Attributes:
        row_of: row of each expert.
        missing: those whose rows must be copied first.
    """

    row_of: dict[int, int]
    missing: list[Placement]


class BankLedger:
    """Which expert of which layer is in each row, as far as the host knows.

    Args:
        num_rows: rows of each bank.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._rows: list[list[Held]] = [[None] * num_rows for _ in range(NUM_BANKS)]

    def forget(self, bank: int) -> None:
        """Somebody else may have written to it."""
        self._rows[bank] = [None] * self.num_rows

    @contextmanager
    def copying(self, bank: int, layer: int, placements: Sequence[Placement]) -> Iterator[None]:
        """Around enqueueing copies: if that breaks off, nobody knows what the rows hold."""
        for _, row in placements:
            self._rows[bank][row] = None
        yield
        for expert, row in placements:
            self._rows[bank][row] = layer, expert

    def lacking(self, bank: int, layer: int, experts: Sequence[int]) -> list[Placement]:
        """What to copy so that the first rows hold these experts, at most as many as rows."""
        return [
            Placement(expert, row)
            for row, expert in enumerate(experts)
            if self._rows[bank][row] != (layer, expert)
        ]

    def parts(self, layer: int, experts: Sequence[int]) -> list[BankPart]:
        """Split experts among the banks in turn, beginning with bank 0.

        What the first round finds in its banks is used there.
        """
        left = dict.fromkeys(experts)
        kept: list[dict[int, int]] = []
        for bank in range(NUM_BANKS):
            kept.append(self._held(bank, layer, left))
            for expert in kept[-1]:
                del left[expert]
        waiting, parts = list(left), list[BankPart]()
        while waiting or any(kept):
            row_of = kept.pop(0) if kept else {}
            free = [row for row in range(self.num_rows) if row not in row_of.values()]
            missing = [Placement(*found) for found in zip(waiting, free, strict=False)]
            del waiting[: len(missing)]
            parts.append(BankPart({**row_of, **dict(missing)}, missing))
        return parts

    def _held(self, bank: int, layer: int, wanted: dict[int, None]) -> dict[int, int]:
        held = {key[1]: row for row, key in enumerate(self._rows[bank]) if key and key[0] == layer}
        return {expert: row for expert, row in held.items() if expert in wanted}
