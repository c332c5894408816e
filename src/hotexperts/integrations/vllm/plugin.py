"""vLLM's entry points: what every process of it calls before it does anything else."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

ARG_UTILS = "vllm.engine.arg_utils"
ROUTED_EXPERTS = "vllm.model_executor.layers.fused_moe.routed_experts"
MODULAR_KERNEL = "vllm.model_executor.layers.fused_moe.modular_kernel"
TRITON_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.triton_moe"
PROMETHEUS = "vllm.v1.metrics.prometheus"
WORKER_BASE = "vllm.v1.worker.worker_base"


def register() -> None:
    """`vllm.general_plugins`: flags, hooks on MoE layers, and a worker's counters. Idempotent."""
    after_import(ARG_UTILS, _patch_arguments)
    after_import(ROUTED_EXPERTS, _patch_layers)
    after_import(MODULAR_KERNEL, _patch_kernels)
    after_import(TRITON_EXPERTS, _patch_tuning)
    after_import(PROMETHEUS, _patch_metrics)
    after_import(WORKER_BASE, _patch_workers)


def platform() -> None:
    """`vllm.platform_plugins`: is never a platform, but is asked before `LLM(...)` takes options.

    `LLM(moe_expert_cache_size=...)` reaches `EngineArgs` before vLLM loads its general plug-ins.
    """
    after_import(ARG_UTILS, _patch_arguments)


def after_import(name: str, patch: Callable[[ModuleType], None]) -> None:
    """Patch a module once: now if it is imported already, else as soon as it is."""
    module = sys.modules.get(name)
    if module is not None and not _is_half_imported(module):
        _patch_once(module, patch)
    elif not any(isinstance(f, _Finder) and f.is_for(name, patch) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, patch))


def _is_half_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _patch_once(module: ModuleType, patch: Callable[[ModuleType], None]) -> None:
    done = module.__dict__.setdefault("_hotexperts_patches", set())
    if patch.__name__ not in done:
        done.add(patch.__name__)
        patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find the module, and patches it after they have run it."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._patch = patch

    def is_for(self, name: str, patch: Callable[[ModuleType], None]) -> bool:
        return (self._name, self._patch) == (name, patch)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run, patch = spec.loader.exec_module, self._patch

            def run_and_patch(module: ModuleType) -> None:
                run(module)
                _patch_once(module, patch)

            spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def _patch_arguments(module: ModuleType) -> None:
    from hotexperts.integrations.vllm import flags

    flags.patch(module)


def _patch_layers(module: ModuleType) -> None:
    from hotexperts.integrations.vllm.hooks import patch_layers

    patch_layers(module)


def _patch_kernels(module: ModuleType) -> None:
    from hotexperts.integrations.vllm.hooks import patch_kernels

    patch_kernels(module)


def _patch_tuning(module: ModuleType) -> None:
    from hotexperts.integrations.vllm.compat import patch_tuning

    patch_tuning(module)


def _patch_metrics(module: ModuleType) -> None:
    from hotexperts.integrations.vllm.prometheus import patch

    patch(module)


def _patch_workers(module: ModuleType) -> None:
    from hotexperts.integrations.vllm.hooks import patch_workers

    patch_workers(module)
