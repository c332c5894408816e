"""How many tokens of a call are real: a CUDA graph computes for as many as it was captured with."""

from __future__ import annotations

import torch

ALL_TOKENS = 1 << 24  # more than any call has; times top-k it is still an int32


class TokenCount:
    """A number on the device that captured calls read at each replay.

    Only they have padding. Others see a number of their own, so that both launch one kernel.

    Args:
        device: of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._in_graphs, self._outside = (
            torch.tensor([ALL_TOKENS], dtype=torch.int32, device=device) for _ in range(2)
        )

    def expect(self, num_tokens: int) -> None:
        """From now on, in stream order, tokens of replays beyond so many are padding."""
        self._in_graphs.fill_(num_tokens)

    def of_this_call(self) -> torch.Tensor:
        """Int32 `[1]`: what a call on the current stream is to read."""
        is_captured = self._in_graphs.is_cuda and torch.cuda.is_current_stream_capturing()
        return self._in_graphs if is_captured else self._outside


def of_this_call(token_count: TokenCount | None) -> torch.Tensor | None:
    """What a call on the current stream is to read; None where no token is padding."""
    return None if token_count is None else token_count.of_this_call()
