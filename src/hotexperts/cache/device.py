"""The cache of one layer, device-managed: kernels decide and copy, the host is not asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hotexperts.cache.device_mode import check_device_mode
from hotexperts.cache.guided import GuidedPrefill
from hotexperts.cache.lift import LiftTable
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.padding import TokenCount
from hotexperts.cache.prefetch import GUESSES_A_PAIR, PrefetchLane, num_programs_for
from hotexperts.cache.provider import SLOTS, ExpertWeightResult, Waves
from hotexperts.cache.store import CPUBackingStore
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.cache.transfer import StreamBanks
from hotexperts.cache.turn import Turn
from hotexperts.errors import CheckpointError, ConfigError, ExpertCacheOverflow
from hotexperts.kernels.gather import GatherLayout
from hotexperts.kernels.gather.ahead import AheadCounter
from hotexperts.kernels.gather.launch import BankFill
from hotexperts.kernels.plan import Counter, PlanLayout, may_bypass
from hotexperts.kernels.plan.launch import PlanGather
from hotexperts.kernels.prefetch.launch import Prefetch
from hotexperts.kernels.prefetch.switch import Switch, fresh_switch
from hotexperts.policy import DEFAULT_POLICY
from hotexperts.residency import Residency
from hotexperts.stats import CacheStats

DISTINCT = 0.8  # of a batch's ids name different experts; 45 to 49 of 64 in traces of 128 experts


class DeviceWeightProvider(StreamingProvider):
    """Slots, store and policy of one layer; kernels decide and copy.

    No address changes, and nothing waits for the device but a prefill outside of CUDA graphs
    (guided.py). Every call can be captured in one: the number of waves then follows from the shape
    of the ids alone.

    Args:
        store: all experts, page-locked where the device is a GPU, plain or packed.
        capacity: cached slots, 1 to E.
        policy: one that has a kernel.
        device: a CUDA device; a CPU works under Triton's interpreter.
        banks: as for `CachedWeightProvider`.
        turn: as for `CachedWeightProvider`.
        num_programs: programs that copy; few leave the GPU to compute that runs beside. None: as
            many as the store's form needs, or the lane has.
        tells_pairs: where the host waits, results say which pairs they serve.
        lane: of prefetches, shared by the model's layers of the same layout and `num_programs`.

    Attributes:
        next_provider: of the layer that follows in the model. Between two prefill calls the banks
            fill for it before its router has spoken.
        banks: what it streams through; None where every expert has a slot.
        token_count: of captured calls: later tokens are padding and ask for nothing. None: no
            token is.
        lift: counts of this layer's experts and the next one's, kept up to date by every call that
            is told by `look_ahead`; None: see `guess_by_lift`.

    Raises:
        ConfigError: a capacity outside 1 to E, a policy without a kernel, or tensors whose size
            is no multiple of four bytes.
    """

    is_capturable = True

    def __init__(
        self,
        store: CPUBackingStore | PackedBackingStore,
        capacity: int,
        *,
        policy: str = DEFAULT_POLICY,
        device: torch.device | str = "cuda",
        banks: StreamBanks | None = None,
        turn: Turn | None = None,
        num_programs: int | None = None,
        tells_pairs: bool = False,
        lane: PrefetchLane | None = None,
    ) -> None:
        device = torch.device(device)
        check_device_mode(store.layout, policy, device)
        if not 1 <= capacity <= store.num_experts:
            raise ConfigError(
                f"{capacity} slots for {store.num_experts} experts: give 1 to {store.num_experts}"
            )
        if device.type == "cuda" and not store.is_pinned:
            raise ConfigError("the store is not page-locked: make it with pin=True")
        super().__init__(store, capacity, device, banks, turn)
        self.store: CPUBackingStore | PackedBackingStore = store
        self.capacity = capacity
        self.next_provider: DeviceWeightProvider | None = None
        self.token_count: TokenCount | None = None
        self.lift: LiftTable | None = None
        self._lift_before: LiftTable | None = None  # of the layer before, for this one
        self.tells_pairs = tells_pairs
        buffer, self.tensors = store.layout.allocate(capacity, device)
        self.buffer = buffer.view(torch.int32)
        self.plan = PlanLayout(store.num_experts, capacity, policy)
        rows = store.rows.view(torch.int32)
        if num_programs is None:
            num_programs = num_programs_for([store]) if lane is None else lane.ahead.num_programs
        gather = _gather_layout(store, capacity)
        self._lane = lane
        self.looks_ahead = lane is not None
        self._is_guessed = False
        self.kernel = PlanGather(
            self.plan,
            gather,
            rows,
            self.buffer,
            num_programs=num_programs,
            ahead=None if lane is None else lane.ahead,
            layer=self.layer,
        )
        if lane is not None:
            assert lane.layout == store.layout, "a lane is of one layout"
            assert lane.ahead.num_programs == num_programs, "each goes on where its twin ended"
            ahead_layout = _gather_layout(store, lane.ahead.num_rows)
            self.prefetch = Prefetch(self.kernel, lane.ahead, ahead_layout, rows)
            kernel = self.kernel
            lane.outlives([kernel.state, kernel.counters, kernel.switch, self.prefetch.bases])
        self.slot_of_on_device = self.plan.view(self.kernel.state, "slot_of")
        self.passed = self.plan.view(self.kernel.state, "passed")
        self._waves_by_host = self._copies_by_host = 0
        self.banks = self._banks
        if self.banks is not None:
            self._fill = BankFill(
                self.kernel,
                _gather_layout(store, self.banks.num_rows),
                self.banks.num_rows,
                rows,
                num_programs=num_programs,
            )
            if self.buffer.is_cuda:  # eager prefills may never launch it
                self._fill.warm_up(self.banks.buffers[0].view(torch.int32))
            self.banks.lane.outlives(self._fill.used_ahead)

    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """Make every demanded expert resident and remap, enqueued on the current stream.

        Raises:
            ExpertCacheOverflow: as many ids may need more experts than there are slots, judged by
                the shape alone.
            ConcurrentUseError: another thread is inside.
        """
        with self._turn.taken():
            needed = self._most_demanded(topk_ids)
            if needed > self.capacity:
                raise ExpertCacheOverflow(needed, self.capacity)
            return self._event(topk_ids)

    def waves(self, topk_ids: torch.Tensor, *, prefill: bool = False) -> Waves:
        """One wave over the slots, then as many through the banks as are needed.

        That many as the shape may need, where a graph is captured or it is no prefill; else what
        the plan says, for which the host waits.

        Raises:
            ConcurrentUseError: another thread is inside.
        """
        with self._turn.taken():
            try:
                yield from self._waves(topk_ids, prefill=prefill)
            finally:
                self._end_lane()  # what the model's last layer began beside its compute

    def _waves(self, topk_ids: torch.Tensor, *, prefill: bool) -> Waves:
        num_parts, max_bypassed = self._most_bypassed(topk_ids, prefill=prefill)
        if prefill and num_parts > 0 and self._host_may_wait():
            topk_ids = topk_ids.contiguous()
            # Made anew: kept, the two would refer to each other, and the slots' memory be free
            # only when Python next looks for cycles.
            guided = GuidedPrefill(self)
            yield from guided.waves(topk_ids, self._event(topk_ids, evict=False))
            return
        first = self._event(
            topk_ids, num_parts=num_parts, evict=not prefill, max_bypassed=max_bypassed
        )
        if num_parts == 0:
            yield first
        else:
            yield from self._in_waves(topk_ids, first, num_parts)

    def fill_rows(self, row_of: torch.Tensor, bank: int) -> None:
        """Copy experts that the host chose into a bank: int32 `[E]`, -1 for the others."""
        assert self.banks is not None, "see GuidedPrefill"
        self._fill.rows(row_of, self.banks.buffers[bank].view(torch.int32))

    def guess_by_lift(self, top_k: int) -> None:
        """From now on count which experts of the next layer follow this one's, and guess by it.

        Args:
            top_k: experts that a token asks the next layer for.
        """
        following = self._next_in_lane
        if following is None or self._lane is None:
            return
        sizes = self.store.num_experts, following.store.num_experts
        self.lift = following._lift_before = LiftTable(*sizes, top_k, self.buffer.device)
        self._lane.outlives([self.lift.counts, self.lift.rows])

    @property
    def keeps_ids(self) -> bool:
        """Whether ids that `look_ahead` is given are still read when the next layer runs."""
        return self.lift is not None or self._lift_before is not None

    def look_ahead(
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
        assert self._lane is not None, "a table is of two layers of a lane"
        count = self._token_count_now()
        known = [before, topk_ids] if count is None else [before, topk_ids, count]
        self._lane.start(partial(table.learn, *known), *known)

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
        following = self._next_in_lane
        if following is None or self._lane is None:
            return
        following._is_guessed = True
        prefetch = following.prefetch
        most = min(math.ceil(GUESSES_A_PAIR * num_pairs), following.store.num_experts)
        count = self._token_count_now()
        read = [hidden] if count is None else [hidden, count]
        self._lane.start(lambda: prefetch(guess(), self.layer, most, count), *read)

    @property
    def _next_in_lane(self) -> DeviceWeightProvider | None:
        """The next layer, where its rows come ahead in the same lane; None without."""
        following = self.next_provider
        return following if following is not None and following._lane is self._lane else None

    def count_by_host(self, *, num_waves: int = 0, num_copies: int = 0) -> None:
        """Waves and rows that no kernel counts."""
        self._waves_by_host += num_waves
        self._copies_by_host += num_copies

    @property
    def stats(self) -> CacheStats:
        """The counters, a snapshot; waits for the device."""
        return self.stats_of(self.counts.cpu().tolist())

    @property
    def counts(self) -> torch.Tensor:
        """Int64, on the device: the kernel's counters; with a lane, whether its switch is on."""
        counters = self.kernel.counters
        if self._lane is None:
            return counters
        return torch.cat([counters, self.kernel.switch[Switch.IS_ON :][:1].long()])

    def stats_of(self, counts: Sequence[int]) -> CacheStats:
        """The counters as they were when `counts` held these values."""
        has_shadows = self.plan.policy == "adv"
        return CacheStats(
            calls=counts[Counter.CALLS],
            hits=counts[Counter.HITS],
            misses=counts[Counter.MISSES],
            bypasses=counts[Counter.BYPASSES],
            evictions=counts[Counter.EVICTIONS],
            waves=counts[Counter.WAVES] + self._waves_by_host,
            bytes_moved=self._bytes_of(counts),
            lru_hits=counts[Counter.LRU_HITS] if has_shadows else None,
            best_shadow_hits=(
                max(counts[Counter.SHADOW_HITS : Counter.LRU_HITS]) if has_shadows else None
            ),
            **self._ahead_of(counts),
        )

    def _ahead_of(self, counts: Sequence[int]) -> dict[str, int]:
        """Counters of prefetches; none without a lane."""
        if self._lane is None:
            return {}
        *ahead, is_on = counts[Counter.AHEAD :]
        block_nbytes = self.store.form.nbytes / self.prefetch.blocks_per_row
        return {
            "prefetches": ahead[AheadCounter.ISSUED],
            "prefetch_hits": ahead[AheadCounter.USED],
            "prefetch_bytes": int(ahead[AheadCounter.BLOCKS] * block_nbytes),
            "prefetch_saved_bytes": int(ahead[AheadCounter.SAVED] * block_nbytes),
            "prefetching_layers": int(self._is_guessed and is_on),
        }

    def _bytes_of(self, counts: Sequence[int]) -> int:
        """Over the link: rows copied, less what was there already, and what came ahead."""
        num_copies = counts[Counter.COPIES] + self._copies_by_host
        if self._lane is None:
            return num_copies * self.store.form.nbytes
        ahead = counts[Counter.AHEAD :]
        more = ahead[AheadCounter.BLOCKS] - ahead[AheadCounter.SAVED]
        return int((num_copies + more / self.prefetch.blocks_per_row) * self.store.form.nbytes)

    @property
    def slot_of(self) -> list[int]:
        """Slot of each expert, -1 for none; waits for the device."""
        return self.slot_of_on_device.cpu().tolist()

    @property
    def slot_tensors(self) -> Any:
        """Named tuple of `[capacity, *shape]`, the slots."""
        return self.tensors

    @property
    def lift_nbytes(self) -> int:
        """See `StreamingProvider.lift_nbytes`."""
        return 0 if self.lift is None else self.lift.nbytes

    @property
    def slot_buffer(self) -> torch.Tensor:
        """The memory that the slots are in, int32."""
        return self.buffer

    def reset_stats(self) -> None:
        """Set the counters to zero, in stream order."""
        self.kernel.counters.zero_()
        self._waves_by_host = self._copies_by_host = 0

    def reset(self) -> None:
        """Empty the slots and forget history and counters, in stream order."""
        with self._turn.taken():
            if self._lane is not None:  # whose copies read who is where
                self._lane.clear()
            self.plan.clear(self.kernel.state)
            self.kernel.switch.copy_(fresh_switch(self.kernel.switch.device))
            if self.lift is not None:
                self.lift.clear()
            self.reset_stats()

    @property
    def words(self) -> torch.Tensor:
        """Int32, on the device: who is in which slot and what the policy knows."""
        return self.kernel.state[: self.plan.scratch]

    def state(self) -> dict[str, Any]:
        """See `StreamingProvider.state`."""
        return {"words": self.words.cpu().tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """See `StreamingProvider.restore`."""
        restored = self.plan.restored(state["words"])
        ledger = Residency(self.store.num_experts, self.capacity)
        ledger.restore(self.plan.view(restored, "slot_of").tolist())
        if ledger.expert_of != self.plan.view(restored, "expert_of").tolist():
            raise CheckpointError("the slots of experts and the experts of slots disagree")
        with self._turn.taken():
            if self._lane is not None:
                self._lane.clear()
            self.plan.clear(self.kernel.state)  # nobody is there until all bytes are on their way
            self._copy_in(ledger.slot_of)
            self.kernel.state.copy_(restored)

    def _most_bypassed(self, topk_ids: torch.Tensor, *, prefill: bool) -> tuple[int, int]:
        """Bank waves that ids of this shape may need, and how many experts may pass by freely.

        What passes by finds every slot taken, so there are never more than E - capacity.
        """
        if self._banks is None:
            return 0, 0
        size, needed = self._banks.num_rows, self._most_demanded(topk_ids)
        # Where only ids that all differ would do, nobody passes by and a wave runs for nothing:
        # sequences share experts.
        may_choose = may_bypass(self.plan.policy, int(DISTINCT * needed), self.capacity)
        free_choice = self._free_bypasses(topk_ids) if may_choose else 0
        most = needed if prefill else max(0, needed - self.capacity) + free_choice
        most = min(most, self.store.num_experts - self.capacity)
        return -(-most // size), 0 if prefill else free_choice

    def _event(
        self, topk_ids: torch.Tensor, *, num_parts: int = 0, **how: Any
    ) -> ExpertWeightResult:
        topk_ids = topk_ids.contiguous()
        remapped = torch.empty_like(topk_ids)
        count = self._token_count_now()
        self.kernel(topk_ids, remapped, count, num_waves=1 + num_parts, **how)
        self._end_lane()  # after the last that it was for, which has just ended it
        part = SLOTS if num_parts else None
        return ExpertWeightResult(self.tensors, remapped, self.slot_of_on_device, part)

    def _token_count_now(self) -> torch.Tensor | None:
        return None if self.token_count is None else self.token_count.of_this_call()

    def _end_lane(self) -> None:
        """After the last layer of a lane nothing is apart from the current stream."""
        if self._lane is not None and self._next_in_lane is None:
            self._lane.join()

    def _in_waves(self, topk_ids: torch.Tensor, first: ExpertWeightResult, num_parts: int) -> Waves:
        banks = self.banks
        assert banks is not None, "experts that pass by mean capacity < E, which has banks"
        topk_ids = topk_ids.contiguous()
        local = topk_ids.new_empty(num_parts, *topk_ids.shape)
        row_of = self.slot_of_on_device.new_empty(num_parts, self.store.num_experts)

        def fill(part: int, bank: int) -> None:
            buffer = banks.buffers[bank].view(torch.int32)
            num_fills = banks.num_fills[bank : bank + 1]
            self._fill(part, topk_ids, local[part], row_of[part], buffer, num_fills)

        def result(part: int, bank: int) -> ExpertWeightResult:
            return ExpertWeightResult(banks.tensors[bank], local[part], row_of[part], part)

        with banks.lane.ordered():
            yield from self._through_banks(iter([first]), num_parts, fill, result)

    def _host_may_wait(self) -> bool:
        return not (self.buffer.is_cuda and torch.cuda.is_current_stream_capturing())


def _gather_layout(store: CPUBackingStore | PackedBackingStore, num_rows: int) -> GatherLayout:
    form, sizes = store.form, tuple(spec.nbytes for spec in store.layout.specs)
    return GatherLayout.of(form.offsets, sizes, form.row_nbytes, num_rows, form.packings)
