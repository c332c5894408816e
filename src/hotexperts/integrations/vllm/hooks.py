"""Where vLLM is held: how a layer gets its weights, which kernels it may take, and its workers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from hotexperts.errors import UnsupportedModelError, UnsupportedOperationError
from hotexperts.integrations.vllm import options
from hotexperts.integrations.vllm.compat import DIALECTS, check_loaded_names
from hotexperts.integrations.vllm.options import flag
from hotexperts.integrations.vllm.plugin import check_patched

# Caches of this process's models, a draft model's among them; each lives as long as its model.
_models: list[weakref.ref[Any]] = []


def patch_layers(module: Any) -> None:
    """Create a cached model's expert weights on the host and harvest them layer by layer."""
    cls = module.RoutedExperts
    original = cls._get_quant_method
    is_checked = False

    @functools.wraps(original)
    def _get_quant_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_checked
        method = original(self, *args, **kwargs)
        config = current_config()
        wanted = wanted_by(config)
        if wanted is None:
            return method
        if not is_checked:
            check_loaded_names()
            check_patched()
            is_checked = True
        return _cached(method, caches_of(config, wanted))

    cls._get_quant_method = _get_quant_method


def _cached(method: Any, caches: Any) -> Any:
    import torch

    caches.num_expected += 1
    if getattr(method, "expert_caches", None) is caches:
        return method  # of another layer, too
    create, process = method.create_weights, method.process_weights_after_loading

    def create_weights(*args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            create(*args, **kwargs)
        caches.created(kwargs["layer"] if "layer" in kwargs else args[0])

    def process_weights_after_loading(layer: Any) -> None:
        caches.process(layer, method, process)

    method.create_weights = create_weights
    method.process_weights_after_loading = process_weights_after_loading
    method.expert_caches = caches
    return method


def patch_kernels(module: Any) -> None:
    """Keep a cached model from kernels whose tensors we do not know."""
    cls = module.FusedMoEExperts
    original = cls.is_supported_config

    @functools.wraps(original)
    def is_supported_config(experts: Any, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        if wanted_by(current_config()) is not None and not _is_known(experts):
            return False, f"{experts.__name__} does not work with {flag('size')}"
        return original(experts, *args, **kwargs)

    cls.is_supported_config = staticmethod(is_supported_config)


def _is_known(experts: Any) -> bool:
    return experts.__name__ in DIALECTS and not experts.is_monolithic()


def patch_workers(module: Any) -> None:
    """Forget what warm-up asked for, publish counters, and let `collective_rpc` read them."""
    from hotexperts.integrations.vllm.ending import save_all
    from hotexperts.integrations.vllm.metrics import publishers_of
    from hotexperts.integrations.vllm.ranks import check_of
    from hotexperts.integrations.vllm.state_file import save_now_and_then, save_state, start_warm

    def ours(self: Any) -> list[Any]:
        config = getattr(self, "vllm_config", None)  # missing where a start failed
        return [caches for caches in models() if caches.config is config]

    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_cached(self.vllm_config, ours(self))
        for caches in ours(self):
            caches.give_guesses(self.worker.model_runner.get_model())
        result = self.worker.compile_or_warm_up_model(*args, **kwargs)
        for caches in models():
            caches.reset()
        for caches in ours(self):
            start_warm(caches, self.global_rank)
        return result

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for caches in ours(self):  # a draft model counts by itself
            caches.is_in_step = True
            caches.expect_tokens(scheduler_output.total_num_scheduled_tokens)
        result = original(self, scheduler_output, *args, **kwargs)
        for caches in ours(self):
            caches.is_in_step = False
            if (check := check_of(caches)) is not None:
                check.after_step(caches.providers.values())
            if caches.recorder is not None:
                caches.recorder.after_step(scheduler_output, self.worker.model_runner)
            save_now_and_then(caches)
        for publisher in publishers_of(models(), self.global_rank):
            publisher.after_step()
        return result

    def expert_cache_stats(self: Any) -> list[dict[str, dict[str, int]]]:
        """Counters of this worker's models: each layer's by its name."""
        return [caches.stats() for caches in models()]

    def expert_cache_memory(self: Any) -> list[dict[str, int]]:
        """This worker's bytes: of slots, banks, lift tables and experts in host memory."""
        return [caches.memory() for caches in models()]

    def save_expert_cache_state(self: Any) -> list[str]:
        """Save what a restart may keep, where `state` names a file; the files' names."""
        saved = [save_state(caches) for caches in ours(self)]
        return [name for name in saved if name is not None]

    def end_expert_trace(self: Any) -> list[str]:
        """Write the routing so far where `trace` names a file, and no more; the file's name."""
        ended = [caches.recorder.end() for caches in ours(self) if caches.recorder is not None]
        return [name for name in ended if name is not None]

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ours(self):
            raise UnsupportedOperationError(
                f"reload_weights does not work with {flag('size')}: the experts in host memory "
                "would stay the old ones; start the server again"
            )
        return self.worker.reload_weights(*args, **kwargs)

    def shutdown(self: Any) -> None:
        save_all(ours(self))
        stop(self)

    wrapper: Any = module.WorkerWrapperBase
    stop = wrapper.shutdown
    original = wrapper.execute_model
    wrapper.execute_model = functools.wraps(original)(execute_model)
    wrapper.compile_or_warm_up_model = compile_or_warm_up_model
    wrapper.expert_cache_stats = expert_cache_stats
    wrapper.end_expert_trace = end_expert_trace
    wrapper.expert_cache_memory = expert_cache_memory
    wrapper.reload_weights = reload_weights
    wrapper.save_expert_cache_state = save_expert_cache_state
    wrapper.shutdown = functools.wraps(stop)(shutdown)


def check_cached(config: Any, found: list[Any]) -> None:
    """Refuse a loaded model of which no layer has the cache that was asked for.

    Raises:
        UnsupportedModelError: its experts are in layers of another kind than vLLM's
            `RoutedExperts`. A stage of a pipeline may have none.
    """
    if wanted_by(config) is None or any(caches.layers for caches in found):
        return
    if config.parallel_config.pipeline_parallel_size == 1:
        raise UnsupportedModelError(
            f"{config.model_config.model} has its experts in layers that vLLM does not share among "
            f"models, so that none has a cache: run it without {flag('size')}"
        )


def current_config() -> Any:
    """The `VllmConfig` of the model under construction, or None."""
    from vllm import config

    read: Callable[[], Any] | None = getattr(config, "get_current_vllm_config_or_none", None)
    return read() if read is not None else config.vllm._current_vllm_config


def wanted_by(config: Any) -> options.ExpertCacheOptions | None:
    """What the configuration asks for; None where no cache is wanted."""
    return None if config is None else options.from_additional_config(config.additional_config)


def caches_of(config: Any, wanted: options.ExpertCacheOptions) -> Any:
    """The caches of the model that this configuration describes."""
    from hotexperts.integrations.vllm.caches import ModelCaches

    for caches in models():
        if caches.config is config:
            return caches
    ours = [c for c in models() if c.config.instance_id == config.instance_id]
    caches = ModelCaches(wanted, config, target=ours[0] if ours else None)
    _models.append(weakref.ref(caches))
    return caches


def models() -> list[Any]:
    """The caches of this process's models that are still there."""
    found = [caches for reference in _models if (caches := reference()) is not None]
    _models[:] = [weakref.ref(caches) for caches in found]
    return found
