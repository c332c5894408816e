"""vLLM's entry points: what every process of it calls before it does anything else."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
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


_DONE = "_hotexperts_patches"  # a module's attribute: what was done to it
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
    "vllm.v1.worker.worker_base": _Patch("workers", "patch_workers"),
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
    done = module.__dict__.setdefault(_DONE, set())
    if patch not in done:
        done.add(patch)
        patch(module)


def check_patched() -> None:
    """Refuse to go on with a vLLM of which a part is not patched.

    Raises:
        UnsupportedModelError: modules were imported in an order that nobody foresaw; they are
            named.
    """
    missed = [
        name
        for name, patch in _PATCHES.items()
        if name in sys.modules and patch not in vars(sys.modules[name]).get(_DONE, ())
    ]
    if missed:
        from hotexperts.errors import UnsupportedModelError

        raise UnsupportedModelError(
            f"the plug-in came too late for {', '.join(missed)}: load hotexperts.integrations."
            "vllm.plugin and call its register() before vLLM, and please report how vLLM was run"
        )


class _Finder(importlib.abc.MetaPathFinder):
    """Has the others find the module, and patches it after they have run it."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._patch = patch

    def is_for(self, name: str, patch: Callable[[ModuleType], None]) -> bool:
        return (self._name, self._patch) == (name, patch)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Stays until the module has run: who looks for it may not import it, or fail to."""
        if name != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_patch(module: ModuleType) -> None:
                run(module)
                if module.__name__ != self._name:
                    return  # some loaders are those of many modules
                _patch_once(module, self._patch)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec
