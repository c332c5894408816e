"""vLLM's entry points: what every process of it calls before it does anything else."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class _Patch:
    """A function of this package, imported when there is something to patch."""

    place: str
    function: str

    def __call__(self, module: ModuleType) -> None:
        place = importlib.import_module(f"hotexperts.integrations.vllm.{self.place}")
        getattr(place, self.function)(module)


ARG_UTILS = "vllm.engine.arg_utils"
_LAYERS = "vllm.model_executor.layers.fused_moe"
_PATCHES = {
    ARG_UTILS: _Patch("flags", "patch"),
    f"{_LAYERS}.routed_experts": _Patch("hooks", "patch_layers"),
    f"{_LAYERS}.modular_kernel": _Patch("hooks", "patch_kernels"),
    f"{_LAYERS}.experts.triton_moe": _Patch("compat", "patch_tuning"),
    "vllm.model_executor.model_loader.utils": _Patch("loading", "patch_loading"),
    "vllm.v1.engine.core": _Patch("ending", "patch_loops"),
    "vllm.v1.engine.utils": _Patch("ending", "patch_processes"),
    "vllm.v1.metrics.prometheus": _Patch("prometheus", "patch"),
    "vllm.v1.worker.worker_base": _Patch("hooks", "patch_workers"),
}


def register() -> None:
    """`vllm.general_plugins`: flags, hooks on MoE layers, and a worker's counters. Idempotent."""
    for name, patch in _PATCHES.items():
        after_import(name, patch)


def platform() -> None:
    """`vllm.platform_plugins`: is never a platform, but is asked before `LLM(...)` takes options.

    `LLM(moe_expert_cache_size=...)` reaches `EngineArgs` before vLLM loads its general plug-ins.
    """
    after_import(ARG_UTILS, _PATCHES[ARG_UTILS])


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
    if patch not in done:
        done.add(patch)
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
