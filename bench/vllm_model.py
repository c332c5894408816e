"""The model inside of vLLM's worker: slots, graphs and routing change as it runs."""

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
            store = self.caches._stores[name]
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


class Replay:
    """Makes the routers answer with given ids, inside CUDA graphs too.

    Args:
        model: before it captures the graphs that are to be measured.
        ids: uint8 or int32 `[steps, layers, rows, K]`; row r of a decode step reads row r.
    """

    def __init__(self, model: Model, ids: torch.Tensor) -> None:
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        num_layers, top_k = ids.shape[1], ids.shape[3]
        most = model.config.scheduler_config.max_num_batched_tokens
        device = model.runner.device
        self._num_experts = model.config.model_config.get_num_experts()
        self._ids = ids.int().to(device)
        self._shown = torch.zeros(num_layers, most, top_k, dtype=torch.int32, device=device)
        self.step = 0
        self._prefill: torch.Tensor | None = None
        layers = model.config.compilation_config.static_forward_context
        moe = [layer for layer in layers.values() if hasattr(layer, "router")]
        number_of = {id(layer.router): i for i, layer in enumerate(moe)}
        select = BaseRouter._select_experts

        def replayed(router: Any, *args: Any, **kwargs: Any) -> Any:
            weights, found = select(router, *args, **kwargs)
            found.copy_(self._shown[number_of[id(router)], : found.shape[0]])
            return weights, found

        BaseRouter._select_experts = replayed
        execute = model.runner.execute_model

        def shown(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._show(scheduler_output.total_num_scheduled_tokens)
            return execute(scheduler_output, *args, **kwargs)

        model.runner.execute_model = shown
        self.show_random(0)

    def show_random(self, seed: int) -> None:
        """What prefills see: every expert equally often, no expert twice for one token."""
        num_layers, most, top_k = self._shown.shape
        device = self._shown.device
        generator = torch.Generator(device).manual_seed(seed)
        shape = (num_layers, most, self._num_experts)
        scores = torch.rand(shape, generator=generator, device=device)
        self._prefill = scores.topk(top_k).indices.int()
        self._shown.copy_(self._prefill)

    def _show(self, num_tokens: int) -> None:
        rows = self._ids.shape[2]
        if num_tokens <= rows:
            now = self._ids[self.step % len(self._ids)]
            self._shown[:, :num_tokens].copy_(now[:, :num_tokens])
            self.step += 1
        elif self._prefill is not None:
            self._shown.copy_(self._prefill)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
