"""All caches of one model in one process: how many slots, who shares what, what was counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hotexperts.cache.packed_store import describe_packing
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.config import format_bytes
from hotexperts.errors import ConfigError
from hotexperts.formats import ExpertLayout
from hotexperts.integrations.vllm.budget import (
    HostBudget,
    describe_waves,
    num_ranks_here,
    plan_slots,
)
from hotexperts.integrations.vllm.chunks import Repacked, repack_in_parts
from hotexperts.integrations.vllm.experts import CachedFusedExperts
from hotexperts.integrations.vllm.options import ExpertCacheOptions, flag
from hotexperts.integrations.vllm.prefetching import give_guesses
from hotexperts.integrations.vllm.providers import Providers
from hotexperts.integrations.vllm.self_test import SelfTest, is_wanted
from hotexperts.integrations.vllm.stores import Store, shape_of, store_of
from hotexperts.integrations.vllm.trace import Recorder, recorder_for
from hotexperts.integrations.vllm.weights import hide_parameters, kernel_of, per_expert_parameters
from hotexperts.sizing import LayerShape, SizePlan, fixed_capacity

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
        self.stores: dict[str, Store] = {}  # by layer
        self.shared = Providers(options.cache, config)
        self._guess_by_lift: list[str] = []  # layers
        self.top_k = 0  # of a token in the layer that came last
        self._host: HostBudget | None = None
        # Where the next layer is repacked, and how many experts at a time; None: whole.
        self.in_parts: tuple[torch.device, int] | None = None
        self.rank = 0  # of all workers
        self.digest: str | None = None  # of this rank's weights, where a state is kept
        self.has_started = False  # what the slots hold is what requests asked for
        self.is_in_step = False  # or one was interrupted: what is known may be half of it
        self.num_steps = 0  # since then

    def created(self, layer: nn.Module) -> None:
        """A layer has its experts in host memory, not loaded yet.

        Raises:
            HostMemoryError: all of them are more than the host holds.
        """
        if self.options.check_host_memory:
            self._host = self._host or HostBudget(num_ranks_here(self.config.parallel_config))
            self._host.add(sum(p.nbytes for p in layer.parameters(recurse=False)))

    def process(self, layer: Any, method: Any, process: Callable[[Any], None]) -> None:
        """Have vLLM repack a loaded layer, move its experts into a store and give it slots instead.

        Args:
            layer: vLLM's `RoutedExperts`.
            method: its quantisation method.
            process: what repacks the layer, in place.

        Raises:
            UnsupportedModelError: its method or kernel is not one that we know.
            ConfigError: the slots do not fit, or a few experts do not while they are repacked.
            HostMemoryError: the experts do not.
        """
        if self.in_parts is None:
            process(layer)
            self._add(layer, method)
            return
        if self.options.self_test:
            raise ConfigError(
                f"{flag('options')}: self_test is true, but {layer.layer_name} is too large for "
                "this GPU to run over all of its experts: leave self_test out"
            )
        device, at_once = self.in_parts
        pin = device.type == "cuda"
        repacked = repack_in_parts(layer, method, process, at_once, device, pin=pin)
        if not self.layers:
            log.info(
                "expert cache: layers do not fit the GPU whole: repacked %d of %d experts at a "
                "time, without a self-test",
                at_once,
                layer.local_num_experts,
            )
        self._add(layer, method, repacked)

    def _add(self, layer: Any, method: Any, repacked: Repacked | None = None) -> None:
        experts, dialect = kernel_of(layer, method)
        if repacked is None:
            parameters = per_expert_parameters(layer, experts, layer.local_num_experts)
            tensors = {name: parameter.data for name, parameter in parameters.items()}
        else:
            parameters, tensors = repacked.parameters, repacked.store.tensors._asdict()
        here = next(iter(parameters.values())).data
        device = here.device
        self.top_k = layer.top_k
        if self._plan is None:
            self._plan = self._make_plan(layer, tensors, here)
            self.recorder = recorder_for(self)
        plain = None if repacked is None else repacked.store
        store = store_of(self.options.cache, tensors, device, plain, capacity=self._plan.capacity)
        self.stores[layer.layer_name] = store
        is_tested = repacked is None and is_wanted(self.options.self_test, layer, parameters)
        prefill_tokens = self.options.prefill_tokens
        test = SelfTest(layer, method, prefill_tokens) if is_tested else None
        provider = self.shared.make(store, self._capacity(store), device)
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
        shapes = [shape_of(store, self.top_k) for store in self.stores.values()]
        self._plan = fixed_capacity(capacity, shapes)
        self.shared = Providers(self.options.cache, self.config, self.shared.token_count)
        for name, layer in self.layers.items():
            store, device = self.stores[name], layer.provider.slot_buffer.device
            layer.use(self.shared.make(store, self._capacity(store), device))
        self._give_tables()

    def expect_tokens(self, num_tokens: int) -> None:
        """Before each step: what a CUDA graph computes beyond so many tokens is padding."""
        if self.shared.token_count is not None:
            self.shared.token_count.expect(num_tokens)

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
        """This process's bytes: of slots, of banks, of lift tables, of experts in host memory."""
        providers = self.providers.values()
        tables = [provider.lift_nbytes for provider in providers]
        return {
            "slots": sum(provider.slot_nbytes for provider in providers),
            "banks": self.shared.nbytes,
            **({"lift tables": sum(tables)} if any(tables) else {}),
            "host": sum(provider.store.host_nbytes for provider in providers),
        }

    def describe(self) -> str:
        """One line on slots, memory and policy."""
        if self._plan is None:
            return "expert cache: no MoE layers"
        memory = ", ".join(f"{name} {format_bytes(n)}" for name, n in self.memory().items())
        report = describe_packing(list(self.stores.values()))
        memory += f" ({report})" if report else ""
        first = next(iter(self.stores.values()))
        waves = describe_waves(
            self.config.scheduler_config.max_num_batched_tokens,
            self.top_k,
            capacity=self._capacity(first),
            num_experts=first.num_experts,
        )
        return (
            f"expert cache: {self._plan.reason}; {len(self.layers)} layers, policy "
            f"{self.options.cache.policy}; {memory}; {waves}"
        )

    def give_guesses(self, model: nn.Module) -> None:
        """Before graphs are captured: where prefetches are asked for, say what to fetch."""
        if not self.shared.lanes or self.is_draft:
            return
        by_lift = self.options.cache.prefetch == "lift"
        self._guess_by_lift = list(self.layers) if by_lift else give_guesses(model, self.layers)
        self._give_tables()

    def _give_tables(self) -> None:
        for name in self._guess_by_lift:
            lookahead = self.layers[name].provider.lookahead
            assert lookahead is not None, "where prefetches are asked for, all have one"
            lookahead.guess_by_lift(self.top_k)

    def _make_plan(
        self, layer: Any, tensors: dict[str, torch.Tensor], here: torch.Tensor
    ) -> SizePlan:
        """Of a model's first layer.

        Args:
            layer: vLLM's `RoutedExperts`.
            tensors: of all of its experts.
            here: one of those, of the experts that are on the device now.
        """
        layout, num_experts = ExpertLayout.of(tensors)
        shape = LayerShape(num_experts, layer.top_k, layout.row_nbytes)
        return plan_slots(
            self.options.cache.size,
            [shape] * max(1, self.num_expected),
            self.config,
            layer,
            here.device,
            experts_nbytes=len(here) * layout.row_nbytes,
            most=None if self._target is None else self._target.capacity or None,
            prefetch=self.options.cache.prefetch,
        )

    def _capacity(self, store: Store) -> int:
        assert self._plan is not None, "made when the first layer came"
        return min(self._plan.capacity, store.num_experts)
