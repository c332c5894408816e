"""Text piece by piece while it is generated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a long character decode to


@dataclass(slots=True)
class TextPieces:
    """Turns token ids into text as they come: a `streamer` for Transformers' `generate`.

    Attributes:
        tokenizer: decodes.
        emit: called with each piece of text.
        token_ids: the new ids.
        times: when each came, `time.perf_counter()`.
        pieces: the text so far.
        skip_special_tokens: leave them out of the text.
    """

    tokenizer: Any
    emit: Callable[[str], None]
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    skip_special_tokens: bool = True
    _had_prompt: bool = False
    _context_begin: int = 0
    _begin: int = 0

    def put(self, ids: torch.Tensor) -> None:
        """Take the prompt at first, then the ids of each step."""
        if not self._had_prompt:
            self._had_prompt = True
            return
        self.times.append(time.perf_counter())
        self.token_ids.extend(ids.flatten().tolist())
        self._emit(is_last=False)

    def end(self) -> None:
        """Emit what was held back."""
        self._emit(is_last=True)

    def _emit(self, *, is_last: bool) -> None:
        """Text of the ids since `_begin`; the ids before them decide about spaces."""
        known = self._decode(self.token_ids[self._context_begin : self._begin])
        text = self._decode(self.token_ids[self._context_begin :])
        if len(text) <= len(known) or (text.endswith(_UNFINISHED) and not is_last):
            return
        self.pieces.append(text[len(known) :])
        self._context_begin, self._begin = self._begin, len(self.token_ids)
        self.emit(self.pieces[-1])

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens))
