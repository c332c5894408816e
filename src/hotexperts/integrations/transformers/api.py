"""The three public doors: load a model, attach a cache to one, or install for plain code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hotexperts.config import CacheConfig, StoreKind, parse_cache_size
from hotexperts.errors import (
    CheckpointError,
    ConfigError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from hotexperts.integrations.transformers import experts
from hotexperts.integrations.transformers import load as loading
from hotexperts.integrations.transformers.load import LoadOptions, Progress
from hotexperts.policy import DEFAULT_POLICY, POLICIES

DEQUANTISED = ("fp8", "mxfp4")
_NOT_WITH_A_CACHE = ("device_map", "tp_plan", "tp_size", "distributed_config", "state_dict")


def load(
    path_or_id: str | Path,
    *,
    expert_cache_size: int | str = "auto",
    policy: str = DEFAULT_POLICY,
    expert_store: StoreKind = "ram",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    experts_algorithm: experts.Algorithm = "auto",
    kv_tokens: int = 4096,
    check_host_memory: bool = True,
    progress: Progress = lambda done, total: None,
    auto_class: Any = None,
    **from_pretrained: Any,
) -> Any:
    """Load a Mixture-of-Experts model whose experts stay on the host, but for the hot ones.

    Args:
        path_or_id: a folder with a safetensors checkpoint, or a hub id.
        expert_cache_size: slots a layer, a GPU budget for the whole model ("6GiB": weights, slots,
            banks, KV cache and workspace), or "auto": as many slots as 0.9 of the free memory
            holds.
        policy: which expert leaves: a registered name or "module:Class".
        expert_store: "ram" copies the experts into host memory, page-locked for a GPU; "file"
            leaves them in the checkpoint, memory-mapped.
        device: "cuda", "cuda:1", "cpu"; None takes CUDA where there is one.
        dtype: as Transformers takes it; "auto" is the checkpoint's.
        experts_algorithm: "auto", or one of Transformers' own: "eager", "batched_mm",
            "grouped_mm".
        kv_tokens: tokens (context x batch) of KV cache that a budget leaves room for.
        check_host_memory: refuse before loading where the host seems to have too little memory.
        progress: called with (experts loaded, experts in all).
        auto_class: the class whose `from_pretrained` loads; None is `AutoModelForCausalLM`.
        **from_pretrained: passed on to it (`revision`, `token`, `trust_remote_code`, ...). Remote
            code is refused unless `trust_remote_code=True`.

    Returns:
        The Transformers model, in evaluation mode, with an `expert_cache` (see `ExpertCache`).

    Raises:
        ConfigError: a size, policy or other option that cannot take effect.
        CheckpointError: the path does not exist, or its files are incomplete or corrupt.
        UnsupportedModelError: not an MoE model, or experts of an unknown form; the class is named.
        UnsupportedOperationError: `device_map`, `tp_plan` and their like.
        HostMemoryError: the host has too little memory, or may not page-lock as much.
    """
    for name in _NOT_WITH_A_CACHE:
        if from_pretrained.get(name) is not None:
            raise UnsupportedOperationError(
                f"{name} does not work with an expert cache: give device='cuda' or 'cpu'"
            )
    options = _options(
        expert_cache_size, policy, expert_store, experts_algorithm, kv_tokens, check_host_memory
    )
    where = _device(device)
    _check_dtype(dtype)
    config = read_config(path_or_id, from_pretrained)
    from_pretrained.setdefault("trust_remote_code", False)
    wants_info = from_pretrained.pop("output_loading_info", False)
    from_pretrained.setdefault("use_safetensors", True)
    with loading.pending(replace(options, progress=progress)):
        try:
            model, info = (auto_class or _causal_lm()).from_pretrained(
                path_or_id,
                config=config,
                dtype=dtype,
                device_map={"": where},
                experts_implementation=experts.NAME,
                output_loading_info=True,
                **from_pretrained,
            )
        except OSError as error:
            raise CheckpointError(_why_unreadable(path_or_id, error)) from error
    _require_cache(model)
    _require_complete(path_or_id, info)
    return (model, info) if wants_info else model


def attach(
    model: Any,
    *,
    expert_cache_size: int | str,
    policy: str = DEFAULT_POLICY,
    device: str | torch.device | None = None,
    experts_algorithm: experts.Algorithm = "auto",
    kv_tokens: int = 4096,
    check_host_memory: bool = True,
) -> Any:
    """Cache the experts of a model that is already in host memory.

    Its experts move into page-locked memory layer by layer, its other weights to the device.

    Args:
        model: a loaded Transformers model.
        expert_cache_size: as for `load`.
        policy: as for `load`.
        device: as for `load`.
        experts_algorithm: as for `load`.
        kv_tokens: as for `load`.
        check_host_memory: refuse where the host has no room for one layer more.

    Returns:
        The same model, changed in place.

    Raises:
        ConfigError: a size, policy or other option that cannot take effect.
        UnsupportedModelError: not an MoE model, or experts of an unknown form.
        UnsupportedOperationError: it has a cache already, or is spread over devices.
    """
    if hasattr(model, "expert_cache"):
        raise UnsupportedOperationError("the model has an expert cache already")
    if len(set((getattr(model, "hf_device_map", None) or {"": ""}).values())) > 1:
        raise UnsupportedOperationError(
            "the model is spread by device_map: load it on the CPU, or use load()"
        )
    options = _options(
        expert_cache_size, policy, "ram", experts_algorithm, kv_tokens, check_host_memory
    )
    loading.attach(model, options, _device(device))
    return model


def install(
    *,
    expert_cache_size: int | str = "auto",
    policy: str = DEFAULT_POLICY,
    expert_store: StoreKind = "ram",
    experts_algorithm: experts.Algorithm = "auto",
    kv_tokens: int = 4096,
    check_host_memory: bool = True,
) -> None:
    """Let plain code use the cache: `from_pretrained(..., experts_implementation="hotexperts")`.

    Models that do not ask for it load as before. Calling again changes the options.

    Args:
        expert_cache_size: as for `load`.
        policy: as for `load`.
        expert_store: as for `load`.
        experts_algorithm: as for `load`.
        kv_tokens: as for `load`.
        check_host_memory: as for `load`.
    """
    loading.install(
        _options(
            expert_cache_size, policy, expert_store, experts_algorithm, kv_tokens, check_host_memory
        )
    )


def _causal_lm() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _options(
    size: int | str,
    policy: str,
    store: StoreKind,
    algorithm: experts.Algorithm,
    kv_tokens: int,
    check_host_memory: bool,
) -> LoadOptions:
    POLICIES.load(policy)
    if algorithm not in experts.ALGORITHMS:
        raise ConfigError(
            f"experts_algorithm is {algorithm!r}: use one of {', '.join(experts.ALGORITHMS)}"
        )
    if kv_tokens < 1:
        raise ConfigError(f"kv_tokens is {kv_tokens}: give at least 1")
    cache = CacheConfig(parse_cache_size(size), policy, store, check_host_memory)
    return LoadOptions(cache, algorithm, kv_tokens)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not one: use 'cuda', 'cuda:N' or 'cpu'") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: this torch sees no CUDA device; use 'cpu'")
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported: use 'cuda', 'cuda:N' or 'cpu'")
    return found


def _check_dtype(dtype: str | torch.dtype) -> None:
    known = isinstance(dtype, torch.dtype) or dtype == "auto"
    if not known and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"dtype {dtype!r} is not one: use 'auto', 'bfloat16', 'float16' or so")


def read_config(path_or_id: str | Path, options: dict[str, Any]) -> Any:
    """The model's configuration; quantised experts are asked to be dequantised on loading.

    Args:
        path_or_id: as for `load`.
        options: `from_pretrained`'s, of which those that find the repository are used.

    Raises:
        CheckpointError: there is no configuration at that path or id.
    """
    from transformers import AutoConfig

    looks_local = isinstance(path_or_id, Path) or str(path_or_id).startswith((".", "/", "~"))
    if looks_local and not Path(path_or_id).is_dir():
        raise CheckpointError(f"{path_or_id}: no such folder")
    hub_options = ("revision", "token", "trust_remote_code", "cache_dir", "local_files_only")
    chosen = {name: options[name] for name in hub_options if name in options}
    chosen.setdefault("trust_remote_code", False)
    try:
        config = AutoConfig.from_pretrained(path_or_id, **chosen)
    except (OSError, ValueError) as error:
        what = "" if Path(path_or_id).is_dir() else "neither a folder nor a readable hub id: "
        raise CheckpointError(f"{path_or_id}: {what}{_first_line(error)}") from error
    _dequantise(path_or_id, getattr(config, "quantization_config", None))
    return config


def _dequantise(path_or_id: str | Path, quantization: Any) -> None:
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in DEQUANTISED:
        raise UnsupportedModelError(
            f"{path_or_id}: quantised by {method!r}; an expert cache on Transformers loads plain "
            f"weights and {', '.join(DEQUANTISED)} checkpoints, which it dequantises"
        )
    quantization["dequantize"] = True


def _require_cache(model: Any) -> None:
    if not hasattr(model, "expert_cache"):
        raise UnsupportedModelError(
            f"{type(model).__name__} was loaded without an expert cache: it is not a "
            "Mixture-of-Experts model that hotexperts knows; load it with Transformers as it is"
        )


def _require_complete(path_or_id: str | Path, info: dict[str, Any]) -> None:
    """Transformers fills missing weights with random numbers and only warns."""
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info.get(kind) or ())
        if names:
            raise CheckpointError(
                f"{path_or_id}: {len(names)} {kind.replace('_keys', '')} tensors, first "
                f"{names[0]}: the checkpoint is incomplete, or of another model"
            )


def _why_unreadable(path_or_id: str | Path, error: OSError) -> str:
    if any(Path(path_or_id).glob("*.bin")):
        return (
            f"{path_or_id}: holds pickle files, which are never read because they can run code: "
            "convert them to safetensors (save_pretrained writes them)"
        )
    return f"{path_or_id}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
