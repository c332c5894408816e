"""The cache of one layer, device-managed: kernels decide and copy, the host is not asked."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.cache.bank_waves import BankWaves
from hotexperts.cache.device_counters import DeviceCounters
from hotexperts.cache.device_slots import DeviceSlots, check_slots
from hotexperts.cache.guided import GuidedPrefill
from hotexperts.cache.lookahead import Lookahead
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.padding import TokenCount, of_this_call
from hotexperts.cache.prefetch import PrefetchLane, num_programs_for
from hotexperts.cache.provider import SLOTS, ExpertWeightResult, Waves
from hotexperts.cache.store import CPUBackingStore
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.cache.transfer import StreamBanks
from hotexperts.cache.turn import Turn
from hotexperts.errors import ExpertCacheOverflow
from hotexperts.kernels.plan import may_bypass
from hotexperts.policy import DEFAULT_POLICY
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
        slots: memory, plan and kernel.
        buffer: the memory that the slots are in, int32.
        kernel: of the slots.
        plan: of the kernel's state.
        lookahead: guesses for the next layer, and tells this one's kernel what came ahead; None
            without a lane.
        bank_waves: of what passes by without the host; None where every expert has a slot.
        counters: of all calls.

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
        check_slots(store, capacity, policy, device)
        super().__init__(store, capacity, device, banks, turn)
        self.store: CPUBackingStore | PackedBackingStore = store
        self.capacity = capacity
        self.tells_pairs = tells_pairs
        self._next_provider: DeviceWeightProvider | None = None
        self._token_count: TokenCount | None = None
        ahead = None if lane is None else lane.ahead
        if num_programs is None:
            num_programs = num_programs_for([store]) if ahead is None else ahead.num_programs
        self.slots = slots = DeviceSlots(
            store, capacity, policy, device, num_programs, ahead=ahead, layer=self.layer
        )
        self.buffer, self.plan, self.kernel = slots.buffer, slots.plan, slots.kernel
        self.lookahead = None if lane is None else Lookahead(lane, slots)
        self.counters = DeviceCounters(slots, self.lookahead)
        self.banks = self._banks
        self.bank_waves = None if self.banks is None else BankWaves(slots, self.banks)

    @property
    def next_provider(self) -> DeviceWeightProvider | None:
        """See the class."""
        return self._next_provider

    @next_provider.setter
    def next_provider(self, following: DeviceWeightProvider | None) -> None:
        self._next_provider = following
        if self.lookahead is not None:
            self.lookahead.precede(None if following is None else following.lookahead)

    @property
    def token_count(self) -> TokenCount | None:
        """See the class."""
        return self._token_count

    @token_count.setter
    def token_count(self, token_count: TokenCount | None) -> None:
        self._token_count = token_count
        if self.lookahead is not None:
            self.lookahead.token_count = token_count

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
                if self.lookahead is not None:
                    self.lookahead.end_call()  # what the last layer began beside its compute

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
            assert self.bank_waves is not None, "what passes by does so through banks"
            yield from self.bank_waves.waves(topk_ids, first, num_parts)

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
        count = of_this_call(self._token_count)
        self.kernel(topk_ids, remapped, count, num_waves=1 + num_parts, **how)
        if self.lookahead is not None:
            self.lookahead.end_call()  # after the last that it was for, which has just ended it
        part = SLOTS if num_parts else None
        return ExpertWeightResult(self.slots.tensors, remapped, self.slots.slot_of, part)

    def _host_may_wait(self) -> bool:
        return not (self.buffer.is_cuda and torch.cuda.is_current_stream_capturing())

    @property
    def stats(self) -> CacheStats:
        """The counters, a snapshot; waits for the device."""
        return self.counters.stats_of(self.counters.now.cpu().tolist())

    @property
    def slot_of(self) -> list[int]:
        """Slot of each expert, -1 for none; waits for the device."""
        return self.slots.slot_of.cpu().tolist()

    @property
    def slot_tensors(self) -> Any:
        """Named tuple of `[capacity, *shape]`, the slots."""
        return self.slots.tensors

    @property
    def lift_nbytes(self) -> int:
        """See `StreamingProvider.lift_nbytes`."""
        table = None if self.lookahead is None else self.lookahead.lift
        return 0 if table is None else table.nbytes

    @property
    def slot_buffer(self) -> torch.Tensor:
        """The memory that the slots are in, int32."""
        return self.buffer

    def reset_stats(self) -> None:
        """Set the counters to zero, in stream order."""
        self.counters.clear()

    def reset(self) -> None:
        """Empty the slots and forget history and counters, in stream order."""
        with self._turn.taken():
            if self.lookahead is not None:
                self.lookahead.clear()
            self.slots.clear()
            self.reset_stats()

    def state(self) -> dict[str, Any]:
        """See `StreamingProvider.state`."""
        return {"words": self.slots.words.cpu().tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """See `StreamingProvider.restore`."""
        restored, slot_of = self.slots.restored(state["words"])
        with self._turn.taken():
            if self.lookahead is not None:
                self.lookahead.lane.clear()
            self.slots.clear()  # nobody is there until all bytes are on their way
            self._copy_in(slot_of)
            self.kernel.state.copy_(restored)
