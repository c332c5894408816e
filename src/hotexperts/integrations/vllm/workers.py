"""vLLM's workers: what is done around their steps, and what `collective_rpc` may call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hotexperts.errors import UnsupportedOperationError
from hotexperts.integrations.vllm.ending import save_all
from hotexperts.integrations.vllm.hooks import check_cached, models
from hotexperts.integrations.vllm.metrics import publishers_of
from hotexperts.integrations.vllm.options import flag
from hotexperts.integrations.vllm.ranks import check_of
from hotexperts.integrations.vllm.state_file import save_now_and_then, save_state, start_warm


def patch_workers(module: Any) -> None:
    """Forget what warm-up asked for, publish counters, and let `collective_rpc` read them."""
    wrapper: Any = module.WorkerWrapperBase
    for method in ADDED:
        setattr(wrapper, method.__name__, method)
    for name, around in {"execute_model": _around_step, "shutdown": _before_shutdown}.items():
        original = getattr(wrapper, name)
        setattr(wrapper, name, functools.wraps(original)(around(original)))


def _ours(worker: Any) -> list[Any]:
    config = getattr(worker, "vllm_config", None)  # missing where a start failed
    return [caches for caches in models() if caches.config is config]


def _around_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _ours(self)  # a draft model counts by itself
        for caches in ours:
            caches.is_in_step = True
            caches.expect_tokens(scheduler_output.total_num_scheduled_tokens)
        result = original(self, scheduler_output, *args, **kwargs)
        for caches in ours:
            _after_step(caches, scheduler_output, self)
        for publisher in publishers_of(models(), self.global_rank):
            publisher.after_step()
        return result

    return execute_model


def _after_step(caches: Any, scheduler_output: Any, worker: Any) -> None:
    caches.is_in_step = False
    if (check := check_of(caches)) is not None:
        check.after_step(caches.providers.values())
    if caches.recorder is not None:
        caches.recorder.after_step(scheduler_output, worker.worker.model_runner)
    save_now_and_then(caches)


def _before_shutdown(original: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(self: Any) -> None:
        save_all(_ours(self))
        original(self)

    return shutdown


def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's, before which guesses are given, and after which slots are as they will serve."""
    check_cached(self.vllm_config, _ours(self))
    for caches in _ours(self):
        caches.give_guesses(self.worker.model_runner.get_model())
    result = self.worker.compile_or_warm_up_model(*args, **kwargs)
    for caches in models():
        caches.reset()
    for caches in _ours(self):
        start_warm(caches, self.global_rank, self.worker.model_runner.get_model())
    return result


def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's, where there is no cache.

    Raises:
        UnsupportedOperationError: there is one.
    """
    if _ours(self):
        raise UnsupportedOperationError(
            f"reload_weights does not work with {flag('size')}: the experts in host memory would "
            "stay the old ones; start the server again"
        )
    return self.worker.reload_weights(*args, **kwargs)


def expert_cache_stats(self: Any) -> list[dict[str, dict[str, int]]]:
    """Counters of this worker's models: each layer's by its name."""
    return [caches.stats() for caches in models()]


def expert_cache_memory(self: Any) -> list[dict[str, int]]:
    """This worker's bytes: of slots, banks, lift tables and experts in host memory."""
    return [caches.memory() for caches in models()]


def save_expert_cache_state(self: Any) -> list[str]:
    """Save what a restart may keep, where `state` names a file; the files' names."""
    saved = [save_state(caches) for caches in _ours(self)]
    return [name for name in saved if name is not None]


def end_expert_trace(self: Any) -> list[str]:
    """Write the routing so far where `trace` names a file, and no more; the file's name."""
    ended = [caches.recorder.end() for caches in _ours(self) if caches.recorder is not None]
    return [name for name in ended if name is not None]


ADDED: tuple[Callable[..., Any], ...] = (
    compile_or_warm_up_model,
    reload_weights,
    expert_cache_stats,
    expert_cache_memory,
    save_expert_cache_state,
    end_expert_trace,
)
