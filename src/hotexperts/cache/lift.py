"""The cross-layer lift table on the device: what one layer's experts say about the next one's.

`predict.cross_lift` is the specification, in float32 as here. Every token is one of its calls, also
in a batch and in a prefill.
"""

from __future__ import annotations

import torch

from hotexperts.predict import pairs, popularity
from hotexperts.predict.base import MOST_LOG_ODDS

MOST_TOKENS = 2048  # that are counted at once: their marks take 4 bytes an expert


class LiftTable:
    """Counts of two layers' experts that a token asked for, and the scores that follow from them.

    All shapes follow from the arguments' and no address changes: each method can be captured in a
    CUDA graph and compiled as one graph. Counts are whole numbers (or halves of such) that float32
    holds exactly, whatever matrix products may round to.

    Args:
        num_before: experts of the layer that guesses.
        num_after: experts of the layer that is guessed for.
        top_k: experts that a token asks the latter for, where chances start from.
        device: of both.

    Attributes:
        counts: float32 `[num_before + 1, num_after + 1]`: tokens that asked for both; in the last
            column those that asked for the first one, in the last row for the second one, in the
            corner all.
        rows: float32 `[num_before + 2, num_after]`: log(P(e | a) / p_e) of each expert a before;
            then log(p_e / (1 - p_e)); then zeros, which are the row of id -1.
    """

    def __init__(
        self, num_before: int, num_after: int, top_k: int, device: torch.device | str
    ) -> None:
        with torch.inference_mode(False):  # else nobody outside of it could write
            how = {"dtype": torch.float32, "device": device}
            self.counts = torch.zeros(num_before + 1, num_after + 1, **how)
            self.rows = torch.zeros(num_before + 2, num_after, **how)
        self._base = min(0.5, top_k / num_after)
        self._before: torch.Tensor | None = None
        self._weigh()

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self.counts.nbytes + self.rows.nbytes

    def clear(self) -> None:
        """Forget everything, in stream order."""
        self._before = None
        self.counts.zero_()
        self._weigh()

    @torch.no_grad()
    def scores(self, ids: torch.Tensor) -> torch.Tensor:
        """Log-odds of the next layer's experts, float32 `[T, num_after]`.

        Args:
            ids: int `[T, K]`, what each token asks the layer before for, all different; -1 is
                nobody.
        """
        known = ids.long().clamp(-1, len(self.rows) - 1)  # an index beyond would end the context
        return self.rows[known].sum(1) + self.rows[-2]

    def expect(self, ids: torch.Tensor) -> None:
        """Keep what the layer before was asked for, until the next one is asked: see `take`."""
        self._before = ids

    def take(self) -> torch.Tensor | None:
        """What was kept, once: memory of a graph must not be held for longer than its capture."""
        kept, self._before = self._before, None
        return kept

    @torch.no_grad()
    def learn(
        self, before: torch.Tensor, after: torch.Tensor, num_valid: torch.Tensor | None = None
    ) -> None:
        """Count what the same tokens asked both layers for.

        Args:
            before: int `[T, K]`; -1 is nobody.
            after: int `[T, L]`, likewise.
            num_valid: int32 `[1]` on the device; tokens from there on are padding. None: none is.
        """
        for first in range(0, len(before), MOST_TOKENS):
            rows = slice(first, first + MOST_TOKENS)
            old = _marks(before[rows], self.counts.shape[0])
            new = _marks(after[rows], self.counts.shape[1])
            if num_valid is not None:
                token = torch.arange(first, first + len(old), device=old.device)
                old *= (token < num_valid).unsqueeze(1)
            self.counts.addmm_(old.T, new)
        self._weigh()

    def _weigh(self) -> None:
        """Make the rows anew from the counts."""
        counts = self.counts
        is_few = (counts[-1:, -1:] < popularity.MOST_CALLS).float()
        counts.mul_(0.5 + 0.5 * is_few)
        num_from, num_calls = counts[:-1, -1:], counts[-1:, -1:]
        chance = counts[-1:, :-1] + popularity.PRIOR * self._base
        chance = chance / (num_calls + popularity.PRIOR)
        given = (counts[:-1, :-1] + pairs.PRIOR * chance) / (num_from + pairs.PRIOR)
        self.rows[:-2].copy_(torch.log(given / chance))
        odds = torch.log(chance) - torch.log1p(-chance)
        self.rows[-2:-1].copy_(odds.clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS))


def _marks(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Float32 `[T, width]`: 1 for each expert of a token, and in the last column if it has any."""
    marks = torch.zeros(len(ids), width, dtype=torch.float32, device=ids.device)
    marks.scatter_(1, ids.long() % width, 1.0)  # -1 to the last column
    marks[:, -1] = (ids >= 0).any(1)
    return marks
