"""The model inside of vLLM's worker: slots and graphs change as it runs."""

from __future__ import annotations

from typing import Any

import torch


class Model:
    """What a benchmark turns where the model is: slots and graphs.

    0 slots have every expert resident, as without the plug-in.

    Args:
        config: vLLM's `VllmConfig`.
        runner: vLLM's model runner, which has loaded it.
        keeps_graphs: graphs that are not used any more stay in memory: of several ranks, each has
            mapped what the others' graphs write, which must not be given back under it.
    """

    def __init__(self, config: Any, runner: Any, *, keeps_graphs: bool = False) -> None:
        self.config = config
        self.runner = runner
        self._resident: dict[str, Any] = {}
        self._keeps_graphs = keeps_graphs
        self._old_graphs: list[Any] = []

    @property
    def caches(self) -> Any:
        """The plug-in's caches of this model."""
        from hotexperts.integrations.vllm import hooks

        ours = self.config.instance_id
        return next(c for c in hooks.models() if c.config.instance_id == ours)

    def use_slots(self, capacity: int) -> None:
        """Another number of slots a layer; 0 has every expert resident, as without the plug-in."""
        self.clear_graphs()
        for layer in self.caches.layers.values():
            experts = layer._multiply.__self__
            experts.apply = layer.apply
        if capacity == 0:
            self._make_resident()
        else:
            self._resident.clear()
            self.caches.resize(capacity)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.capture_graphs()
        if capacity:
            self.caches.reset()

    def _make_resident(self) -> None:
        for name, layer in self.caches.layers.items():
            store = self.caches.stores[name]
            device = layer.provider.slot_buffer.device
            buffer, tensors = store.layout.allocate(store.num_experts, device)
            for expert in range(store.num_experts):
                store.copy_into(expert, [tensor[expert] for tensor in tensors])
            for tensor_name, parameter in layer._parameters.items():
                parameter.data = getattr(tensors, tensor_name)
            layer._multiply.__self__.apply = layer._multiply
            self._resident[name] = buffer

    def clear_graphs(self) -> None:
        """Forget the captured graphs, whose addresses may be old."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        synchronize()
        if self._keeps_graphs:
            wrappers = list(CUDAGraphWrapper._all_instances)
            self._old_graphs += [dict(w.concrete_cudagraph_entries) for w in wrappers]
        CUDAGraphWrapper.clear_all_graphs()

    def capture_graphs(self) -> None:
        """Capture them anew."""
        from vllm.config import set_current_vllm_config

        if self.config.model_config.enforce_eager:
            return
        with set_current_vllm_config(self.config):
            self.runner.capture_model()

    @property
    def has_slots(self) -> bool:
        """Whether experts come from a cache now."""
        from hotexperts.integrations.vllm import hooks

        return bool(hooks.models()) and not self._resident

    def sums(self) -> dict[str, int]:
        """Counters of all layers together."""
        found: dict[str, int] = {}
        for counts in self.caches.stats().values():
            for name, value in counts.items():
                found[name] = found.get(name, 0) + value
        return found

    def reset_stats(self) -> None:
        """Count from here on."""
        for layer in self.caches.layers.values() if self.has_slots else ():
            layer.provider.reset_stats()

    def peak_gpu_gb(self) -> float:
        """The most that tensors took at once, load and graphs included."""
        return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
