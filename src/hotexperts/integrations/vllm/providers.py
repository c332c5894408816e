"""Makes the providers of a model's layers one after another, and has what they share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hotexperts.cache import CachedWeightProvider, StreamBanks
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.padding import TokenCount
from hotexperts.cache.prefetch import PrefetchLane, num_programs_for
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.cache.turn import Turn
from hotexperts.config import CacheConfig
from hotexperts.formats import ExpertLayout
from hotexperts.integrations.vllm.stores import Store
from hotexperts.sizing import bank_rows


class Providers:
    """Layers of one model: their banks, the lanes of their prefetches, their turn and padding.

    Args:
        cache: policy and prefetch.
        config: vLLM's `VllmConfig`.
        token_count: of a step, where graphs have its address already.

    Attributes:
        banks: by what lies in them.
        lanes: likewise; empty where nothing is prefetched.
        turn: of all layers; None before there is one.
        token_count: what a graph computes beyond it is padding; None where that is not known.
    """

    def __init__(
        self, cache: CacheConfig, config: Any, token_count: TokenCount | None = None
    ) -> None:
        self.banks: dict[ExpertLayout, StreamBanks] = {}
        self.lanes: dict[ExpertLayout, PrefetchLane] = {}
        self.turn: Turn | None = None
        self.token_count = token_count
        self._cache = cache
        self._config = config
        self._last: DeviceWeightProvider | None = None

    @property
    def nbytes(self) -> int:
        """Device bytes of what is shared."""
        banks = sum(banks.nbytes for banks in self.banks.values())
        return banks + sum(lane.nbytes for lane in self.lanes.values())

    def make(self, store: Store, capacity: int, device: torch.device) -> StreamingProvider:
        """The next layer's, its slots empty."""
        self.turn = self.turn or Turn(device)
        make: Any = CachedWeightProvider
        if device.type == "cuda":
            make = partial(DeviceWeightProvider, lane=self._lane(store, device))
        provider: StreamingProvider = make(
            store,
            capacity,
            policy=self._cache.policy,
            device=device,
            banks=self._banks(store, capacity, device),
            turn=self.turn,
        )
        provider.slot_buffer.zero_()
        if isinstance(provider, DeviceWeightProvider):
            self._join(provider, device)
        return provider

    def _banks(self, store: Store, capacity: int, device: torch.device) -> StreamBanks | None:
        num_rows = bank_rows(store.num_experts, capacity)
        if num_rows and store.layout not in self.banks:
            self.banks[store.layout] = StreamBanks(store.layout, num_rows, device)
            for buffer in self.banks[store.layout].buffers:
                buffer.zero_()  # a pair of weight 0 must not meet NaN
        return self.banks.get(store.layout)

    def _lane(self, store: Store, device: torch.device) -> PrefetchLane | None:
        """That of the store's layout, where prefetches are asked for."""
        if self._cache.prefetch == "off":
            return None
        if store.layout not in self.lanes:
            lane = PrefetchLane(store.layout, num_programs_for([store]), device)
            self.lanes[store.layout] = lane
        return self.lanes[store.layout]

    def _join(self, provider: DeviceWeightProvider, device: torch.device) -> None:
        """To the layer before, whose prefill fills the banks for it, and to the count of tokens."""
        if self._last is not None:
            self._last.next_provider = provider
        self._last = provider
        parallel = self._config.parallel_config
        context_size = getattr(parallel, "prefill_context_parallel_size", 1)
        if parallel.data_parallel_size > 1 or context_size > 1:
            return  # then a call's rows are not the step's tokens
        self.token_count = self.token_count or TokenCount(device)
        provider.token_count = self.token_count
