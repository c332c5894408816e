"""What `trace --guesses` tells about its guesses."""

from __future__ import annotations

from typing import Any

from hotexperts.simulate.guesses import count_guessed


class Guessed:
    """How much of the demand was guessed so far; as text, the end of a line, empty without."""

    def __init__(self) -> None:
        self._num_demanded = 0
        self._num_guessed: dict[int, int] = {}  # with so many guesses a token and layer

    def add(self, ids: Any, guesses: Any | None) -> None:
        """Count a sequence, `[token, layer, k]` and `[token, layer, guess]`; None adds nothing."""
        if guesses is None:
            return
        for num in (ids.shape[2], guesses.shape[2]):
            found, demanded = count_guessed(ids, guesses, num)
            self._num_guessed[num] = self._num_guessed.get(num, 0) + found
        self._num_demanded += demanded

    def __str__(self) -> str:
        if not self._num_demanded:
            return ""
        found = " and ".join(
            f"{100 * guessed / self._num_demanded:.1f} % with {num}"
            for num, guessed in sorted(self._num_guessed.items())
        )
        return f"; guesses of the next layer's experts found {found}"
