"""All caches of one model in one process: how many slots, who shares what, what was counted."""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

import torch
from torch import nn

from hotexperts.cache import CachedWeightProvider, CPUBackingStore, StreamBanks
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.device_mode import ChosenMode
from hotexperts.cache.host_memory import PageLockError
from hotexperts.cache.packed_store import PackedBackingStore, describe_packing, packs
from hotexperts.cache.padding import TokenCount
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.cache.turn import Turn
from hotexperts.config import Bytes, format_bytes
from hotexperts.errors import UnsupportedModelError
from hotexperts.formats import ExpertLayout
from hotexperts.integrations.vllm.budget import HostBudget, other_nbytes, total_nbytes
from hotexperts.integrations.vllm.compat import DIALECTS
from hotexperts.integrations.vllm.experts import CachedFusedExperts
from hotexperts.integrations.vllm.options import ExpertCacheOptions, flag
from hotexperts.integrations.vllm.ranks import largest_of_ranks
from hotexperts.integrations.vllm.self_test import SelfTest, is_wanted
from hotexperts.integrations.vllm.trace import Recorder, recorder_for
from hotexperts.integrations.vllm.weights import hide_parameters, per_expert_parameters
from hotexperts.sizing import LayerShape, SizePlan, bank_rows, capacity_for_budget, fixed_capacity

Store: TypeAlias = "CPUBackingStore | PackedBackingStore"
log = logging.getLogger("vllm.hotexperts")  # vLLM shows what its own logger's children say


class ModelCaches:
    """The caches of a model's layers, built one after another as vLLM loads them.

    Args:
        options: the user's choices.
        config: vLLM's `VllmConfig`.
        target: the caches of the model that this one drafts for.
    """

    def __init__(
        self, options: ExpertCacheOptions, config: Any, target: ModelCaches | None = None
    ) -> None:
        self.options = options
        self.config = config
        self.num_expected = 0
        self.layers: dict[str, CachedFusedExperts] = {}
        self.publisher: Any = None  # see metrics.py
        self.rank_check: Any = None  # see ranks.py
        self.recorder: Recorder | None = None
        self._target = target
        self._plan: SizePlan | None = None
        self._stores: dict[str, Store] = {}
        self._banks: dict[ExpertLayout, StreamBanks] = {}
        self._turn: Turn | None = None
        self._last: DeviceWeightProvider | None = None
        self._top_k = 0
        self._host: HostBudget | None = None
        self.rank = 0  # of all workers
        self.has_started = False  # what the slots hold is what requests asked for
        self.is_in_step = False  # or one was interrupted: what is known may be half of it
        self.num_steps = 0  # since then
        self._token_count: TokenCount | None = None

    def created(self, layer: nn.Module) -> None:
        """A layer has its experts in host memory, not loaded yet.

        Raises:
            HostMemoryError: all of them are more than the host holds.
        """
        if self.options.check_host_memory:
            self._host = self._host or HostBudget(_num_ranks_here(self.config.parallel_config))
            self._host.add(sum(p.nbytes for p in layer.parameters(recurse=False)))

    def add(self, layer: nn.Module, method: Any) -> None:
        """Move a loaded layer's experts into a store and give it slots instead.

        Raises:
            UnsupportedModelError: its method or kernel is not one that we know.
            ConfigError: the slots do not fit.
            HostMemoryError: the experts do not.
        """
        kernel = getattr(method, "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        dialect = DIALECTS.get(type(experts).__name__)
        if dialect is None:
            found = type(method).__name__ if experts is None else type(experts).__name__
            raise UnsupportedModelError(
                f"{layer.layer_name} runs on {found}, which does not work with {flag('size')}: "
                f"known are {', '.join(sorted(DIALECTS))}"
            )
        num_experts = layer.local_num_experts
        parameters = per_expert_parameters(layer, experts, num_experts)
        tensors = {name: parameter.data for name, parameter in parameters.items()}
        device = next(iter(tensors.values())).device
        self._top_k = layer.top_k
        if self._plan is None:
            self._plan = self._make_plan(layer, tensors, device)
            self.recorder = recorder_for(self)
        store = self._stores[layer.layer_name] = self._store_of(tensors, device)
        is_tested = is_wanted(self.options.self_test, layer, parameters)
        prefill_tokens = self.options.prefill_tokens
        test = SelfTest(layer, method, prefill_tokens) if is_tested else None
        provider = self._provider(store, device)
        hide_parameters(layer, device)
        cached = CachedFusedExperts(provider, experts, parameters, dialect, prefill_tokens)
        self.layers[layer.layer_name] = cached
        if self.recorder is not None:
            cached.recorded = self.recorder.rows_of(layer, store.layout.row_nbytes, device)
        if test is not None:
            test.check()

    def resize(self, capacity: int) -> None:
        """Give every layer so many slots instead, empty.

        CUDA graphs that were captured before hold the old addresses: capture them again.

        Raises:
            ConfigError: the slots do not fit.
        """
        shapes = [_shape(store, self._top_k) for store in self._stores.values()]
        self._plan = fixed_capacity(capacity, shapes)
        self._banks, self._turn, self._last = {}, None, None
        for name, layer in self.layers.items():
            device = layer.provider.slot_buffer.device
            layer.use(self._provider(self._stores[name], device))

    def expect_tokens(self, num_tokens: int) -> None:
        """Before each step: what a CUDA graph computes beyond so many tokens is padding."""
        if self._token_count is not None:
            self._token_count.expect(num_tokens)

    def reset(self) -> None:
        """Forget what warm-up asked for, and say what was built."""
        for layer in self.layers.values():
            layer.provider.reset()
        log.info("%s", self.describe())

    @property
    def is_draft(self) -> bool:
        """Whether another model's tokens are guessed by this one."""
        return self._target is not None

    @property
    def providers(self) -> dict[str, StreamingProvider]:
        """Of each layer, by its name."""
        return {name: layer.provider for name, layer in self.layers.items()}

    @property
    def capacity(self) -> int:
        """Slots a layer; 0 before there is one."""
        return 0 if self._plan is None else self._plan.capacity

    def stats(self) -> dict[str, dict[str, int]]:
        """Each layer's counters by its name; waits for the device."""
        return {name: layer.provider.stats.as_dict() for name, layer in self.layers.items()}

    def memory(self) -> dict[str, int]:
        """This process's bytes: of slots, of banks, and of experts in host memory."""
        providers = self.providers.values()
        return {
            "slots": sum(provider.slot_nbytes for provider in providers),
            "banks": sum(bank.nbytes for bank in self._banks.values()),
            "host": sum(provider.store.host_nbytes for provider in providers),
        }

    def describe(self) -> str:
        """One line on slots, memory and policy."""
        if self._plan is None:
            return "expert cache: no MoE layers"
        memory = ", ".join(f"{name} {format_bytes(n)}" for name, n in self.memory().items())
        report = describe_packing(list(self._stores.values()))
        memory += f" ({report})" if report else ""
        return (
            f"expert cache: {self._plan.reason}; {len(self.layers)} layers, policy "
            f"{self.options.cache.policy}; {memory}; {self._describe_waves()}"
        )

    def _describe_waves(self) -> str:
        """What the largest step, and a token, ask of a layer."""
        store = next(iter(self._stores.values()))
        num_tokens = self.config.scheduler_config.max_num_batched_tokens
        capacity, num_experts = self._capacity(store), store.num_experts
        absent = max(0, min(num_tokens * self._top_k, num_experts) - capacity)
        num_waves = 1 + -(-absent // max(1, bank_rows(num_experts, capacity)))
        found = f"at most {num_waves} waves in a step of {num_tokens} tokens"
        if capacity < self._top_k:
            found += (
                f"; a token asks for {self._top_k} experts, more than the slots: it streams them"
            )
        return found

    def _provider(self, store: Store, device: torch.device) -> StreamingProvider:
        layout, num_experts = store.layout, store.num_experts
        capacity = self._capacity(store)
        self._turn = self._turn or Turn(device)
        num_rows = bank_rows(num_experts, capacity)
        if num_rows and layout not in self._banks:
            self._banks[layout] = StreamBanks(layout, num_rows, device)
            for buffer in self._banks[layout].buffers:
                buffer.zero_()  # a pair of weight 0 must not meet NaN
        make: Any = DeviceWeightProvider if device.type == "cuda" else CachedWeightProvider
        provider: StreamingProvider = make(
            store,
            capacity,
            policy=self.options.cache.policy,
            device=device,
            banks=self._banks.get(layout),
            turn=self._turn,
        )
        provider.slot_buffer.zero_()
        if isinstance(provider, DeviceWeightProvider):
            self._join(provider, device)
        return provider

    def _join(self, provider: DeviceWeightProvider, device: torch.device) -> None:
        """To the layer before, whose prefill fills the banks for it, and to the count of tokens."""
        if self._last is not None:
            self._last.next_provider = provider
        self._last = provider
        parallel = self.config.parallel_config
        context_size = getattr(parallel, "prefill_context_parallel_size", 1)
        if parallel.data_parallel_size > 1 or context_size > 1:
            return  # then a call's rows are not the step's tokens
        self._token_count = self._token_count or TokenCount(device)
        provider.token_count = self._token_count

    def _store_of(self, tensors: dict[str, torch.Tensor], device: torch.device) -> Store:
        assert self._plan is not None, "made when the first layer came"
        is_gpu = device.type == "cuda"
        mode = ChosenMode("device", None) if is_gpu else ChosenMode("host", "host: no CUDA device")
        is_full = self._plan.capacity >= len(next(iter(tensors.values())))
        try:
            if packs(self.options.cache, mode, device, is_full=is_full):
                return PackedBackingStore.from_tensors(tensors, device, pin=is_gpu)
            return CPUBackingStore.from_tensors(tensors, pin=is_gpu)
        except PageLockError as error:
            raise error.needed_by(flag("size"), "leave the cache off") from error

    def _capacity(self, store: Store) -> int:
        assert self._plan is not None, "made when the first layer came"
        return min(self._plan.capacity, store.num_experts)

    def _make_plan(
        self, layer: Any, tensors: dict[str, torch.Tensor], device: torch.device
    ) -> SizePlan:
        layout, num_experts = ExpertLayout.of(tensors)
        shape = LayerShape(num_experts, layer.top_k, layout.row_nbytes)
        shapes = [shape] * max(1, self.num_expected)
        size = self.options.cache.size
        if isinstance(size, int) and not isinstance(size, Bytes):
            return fixed_capacity(size, shapes)
        if self._target is not None and self._target._plan is not None:  # the budget is spent
            return fixed_capacity(min(self._target._plan.capacity, num_experts), shapes)
        total = total_nbytes(size, self.config, device)
        other = other_nbytes(self.config, device, layer, num_experts * layout.row_nbytes)
        other = largest_of_ranks(other)  # so that all have equal slots
        return capacity_for_budget(total, other, shapes)


def _num_ranks_here(parallel: Any) -> int:
    """Processes that hold experts in this host's memory."""
    local = getattr(parallel, "local_world_size", parallel.world_size)
    return int(local * max(1, getattr(parallel, "data_parallel_size_local", 1)))


def _shape(store: Store, top_k: int) -> LayerShape:
    return LayerShape(store.num_experts, top_k, store.layout.row_nbytes)
