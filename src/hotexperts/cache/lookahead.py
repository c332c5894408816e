"""One layer's part in prefetches: it guesses for the next layer, and is guessed for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hotexperts.cache.device_slots import DeviceSlots
from hotexperts.cache.lift import LiftTable
from hotexperts.cache.padding import TokenCount, of_this_call
from hotexperts.cache.prefetch import GUESSES_A_PAIR, PrefetchLane
from hotexperts.kernels.gather.ahead import AheadCounter
from hotexperts.kernels.prefetch.launch import Prefetch
from hotexperts.kernels.prefetch.switch import Switch, fresh_switch


class Lookahead:
    """What goes on in the lane between two layers.

    It knows no provider, only the next layer's lookahead: nothing holds a provider that is dropped.

    Args:
        lane: shared by the model's layers of the same layout.
        slots: the layer's, made for as many programs, with the lane's rows ahead.

    Attributes:
        following: of the layer that comes next, where it is in the same lane; else None.
        token_count: see `DeviceWeightProvider`.
        prefetch: launches the copies for this layer.
        lift: counts of this layer's experts and the next one's, kept up to date by every call that
            is told by `look`; None: see `guess_by_lift`.
    """

    def __init__(self, lane: PrefetchLane, slots: DeviceSlots) -> None:
        assert lane.layout == slots.store.layout, "a lane is of one layout"
        assert lane.ahead.num_programs == slots.num_programs, "each goes on where its twin ended"
        self.lane = lane
        self.following: Lookahead | None = None
        self.token_count: TokenCount | None = None
        self.lift: LiftTable | None = None
        self._lift_before: LiftTable | None = None  # of the layer before, for this one
        self._is_guessed = False
        self._num_experts = slots.store.num_experts
        self._row_nbytes = slots.store.form.nbytes
        self._kernel = kernel = slots.kernel
        rows_ahead = slots.gather(lane.ahead.num_rows)
        self.prefetch = Prefetch(kernel, lane.ahead, rows_ahead, slots.rows)
        lane.outlives([kernel.state, kernel.counters, kernel.switch, self.prefetch.bases])

    def precede(self, following: Lookahead | None) -> None:
        """Guess for this one from now on, if it is in the same lane."""
        is_reached = following is not None and following.lane is self.lane
        self.following = following if is_reached else None

    def guess_by_lift(self, top_k: int) -> None:
        """From now on count which experts of the next layer follow this one's, and guess by it.

        Args:
            top_k: experts that a token asks the next layer for.
        """
        following = self.following
        if following is None:
            return
        sizes, device = (self._num_experts, following._num_experts), self._kernel.state.device
        self.lift = following._lift_before = LiftTable(*sizes, top_k, device)
        self.lane.outlives([self.lift.counts, self.lift.rows])

    @property
    def keeps_ids(self) -> bool:
        """Whether ids that `look` is given are still read when the next layer runs."""
        return self.lift is not None or self._lift_before is not None

    def look(
        self,
        topk_ids: torch.Tensor,
        hidden: torch.Tensor,
        guess: Callable[[torch.Tensor], torch.Tensor] | None,
        *,
        prefill: bool = False,
    ) -> None:
        """Start to copy what the next layer may ask for, and learn; after this layer's plan.

        Args:
            topk_ids: `[T, K]`, what this layer is asked for; -1 is nobody. See `keeps_ids`.
            hidden: `[T, H]`, its input.
            guess: scores of the next layer's experts by that; None: by `lift`, where there is one.
            prefill: guess nothing.
        """
        if guess is not None and not prefill:
            self.guess_next(partial(guess, hidden), hidden, topk_ids.numel())
        elif self.lift is not None and not prefill:
            self.guess_next(partial(self.lift.scores, topk_ids), topk_ids, topk_ids.numel())
        if self.lift is not None:
            self.lift.expect(topk_ids)
        table = self._lift_before
        before = None if table is None else table.take()
        if table is None or before is None or len(before) != len(topk_ids):
            return  # nobody guesses this layer so, or the layer before was not called beforehand
        count = of_this_call(self.token_count)
        known = [before, topk_ids] if count is None else [before, topk_ids, count]
        self.lane.start(partial(table.learn, *known), *known)

    def guess_next(
        self, guess: Callable[[], torch.Tensor], hidden: torch.Tensor, num_pairs: int
    ) -> None:
        """Start to copy what the next layer may ask for; after this layer's plan.

        Args:
            guess: gives scores `[T, E]` of the next layer's experts, the higher the likelier; run
                under the stream of the prefetch.
            hidden: what it reads.
            num_pairs: of tokens and experts, in a layer.
        """
        following = self.following
        if following is None:
            return
        following._is_guessed = True
        prefetch, layer = following.prefetch, self._kernel.layer
        most = min(math.ceil(GUESSES_A_PAIR * num_pairs), following._num_experts)
        count = of_this_call(self.token_count)
        read = [hidden] if count is None else [hidden, count]
        self.lane.start(lambda: prefetch(guess(), layer, most, count), *read)

    def end_call(self) -> None:
        """After the last layer of a lane nothing is apart from the current stream."""
        if self.following is None:
            self.lane.join()

    def clear(self) -> None:
        """Forget what came ahead and what was learned, in stream order."""
        self.lane.clear()  # first: its copies read who is in which slot
        self._kernel.switch.copy_(fresh_switch(self._kernel.switch.device))
        if self.lift is not None:
            self.lift.clear()

    @property
    def is_on(self) -> torch.Tensor:
        """Int64 `[1]`, on the device: whether the layer's switch is on."""
        return self._kernel.switch[Switch.IS_ON :][:1].long()

    def stats_of(self, counts: Sequence[int]) -> dict[str, int]:
        """Fields of `CacheStats`.

        Args:
            counts: by `AheadCounter`, then `is_on`.
        """
        *ahead, is_on = counts
        block_nbytes = self._row_nbytes / self.prefetch.blocks_per_row
        return {
            "prefetches": ahead[AheadCounter.ISSUED],
            "prefetch_hits": ahead[AheadCounter.USED],
            "prefetch_bytes": int(ahead[AheadCounter.BLOCKS] * block_nbytes),
            "prefetch_saved_bytes": int(ahead[AheadCounter.SAVED] * block_nbytes),
            "prefetching_layers": int(self._is_guessed and is_on),
        }

    def rows_more(self, counts: Sequence[int]) -> float:
        """Rows over the link beside those that plans copied, less what plans found there already.

        Args:
            counts: as for `stats_of`.
        """
        return (
            counts[AheadCounter.BLOCKS] - counts[AheadCounter.SAVED]
        ) / self.prefetch.blocks_per_row
