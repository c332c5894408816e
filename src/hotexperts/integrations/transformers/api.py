"""The three public doors: load a model, attach a cache to one, or install for plain code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hotexperts.config import (
    DEFAULT_PACKING,
    DEFAULT_RAM_POLICY,
    CacheConfig,
    CacheMode,
    ExpertDtype,
    ExpertPacking,
    Prefetch,
    StoreKind,
    gib_to_bytes,
    parse_cache_size,
)
from hotexperts.errors import UnsupportedModelError, UnsupportedOperationError
from hotexperts.integrations.transformers import experts
from hotexperts.integrations.transformers import load as loading
from hotexperts.integrations.transformers.load import Progress
from hotexperts.integrations.transformers.options import (
    check_from_pretrained,
    find_device,
    find_dtype,
    make_options,
)
from hotexperts.integrations.transformers.pretrained import from_pretrained_by_us
from hotexperts.integrations.transformers.repository import read_config, require_complete
from hotexperts.policy import DEFAULT_POLICY


def load(
    path_or_id: str | Path,
    *,
    expert_cache_size: int | str = "auto",
    policy: str = DEFAULT_POLICY,
    expert_store: StoreKind = "ram",
    expert_ram_gib: float | None = None,
    expert_ram_policy: str = DEFAULT_RAM_POLICY,
    expert_pack: str | Path | None = None,
    expert_packing: ExpertPacking = DEFAULT_PACKING,
    expert_dtype: ExpertDtype = "none",
    prefetch: Prefetch = "off",
    cache_mode: CacheMode = "auto",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    experts_algorithm: experts.Algorithm = "auto",
    kv_tokens: int | None = None,
    check_host_memory: bool = True,
    progress: Progress = lambda done, total: None,
    auto_class: Any = None,
    **from_pretrained: Any,
) -> Any:
    """Load a Mixture-of-Experts model whose experts stay on the host, but for the hot ones.

    Args:
        path_or_id: a folder with a safetensors checkpoint, a .gguf file (of several, any part) or
            a folder that has one model in GGUF alone, or a hub id.
        expert_cache_size: slots a layer, a GPU budget for the whole model ("6GiB": weights, slots,
            banks, KV cache and workspace), or "auto": as many slots as 0.9 of the free memory
            holds.
        policy: which expert leaves: a registered name or "module:Class".
        expert_store: "ram" copies the experts into host memory, page-locked for a GPU; "file"
            leaves them in the checkpoint, memory-mapped; "disk" reads them from a pack
            (`hotexperts pack`) and keeps some in host memory; "auto" is "ram" where they fit the
            free memory, else "disk" where there is a pack, else "file":
            `expert_cache.store_reason` says why.
        expert_ram_gib: host memory for experts that are on disk, in GiB; None is half of what is
            free.
        expert_ram_policy: which of them leaves that memory: a registered name or "module:Class".
        expert_pack: the pack's file; None is where `hotexperts pack` puts it.
        expert_packing: "packed12" keeps bf16 experts in 12 bits a value in host memory, without
            loss, and kernels unpack them as they copy; "none" keeps them as they are; "auto" packs
            where kernels manage the cache on a GPU and some expert has no slot.
        expert_dtype: "fp8", "int8" or "int4" quantises the experts as they are loaded into host
            memory, which changes their values (`expert_cache.relative_errors` says how much), and
            dequantises each as it is copied into its slot, which holds the model's dtype; "none"
            changes nothing: what a checkpoint has in fp8, mxfp4, int8, int4, or GGUF's
            Q8_0 and Q4_0, stays so.
        prefetch: "router" copies, in the device mode and while the link would be idle, what the
            next layer's router makes of this layer's input; "lift" what has followed this layer's
            experts so far, as counted, which needs no router ("router" does so, too, for layers
            whose router does not work so); "off" copies on demand alone.
        cache_mode: "host" lets Python decide in every layer; "device" lets a kernel decide and
            copy, without the host (CUDA and Triton, experts in "ram", policies with a kernel);
            "auto" is "device" where all of that is given, else "host":
            `expert_cache.mode` says which, `expert_cache.mode_reason` why the host.
        device: "cuda", "cuda:1", "cpu"; None takes CUDA where there is one.
        dtype: "bfloat16", "float16", "float32" or "float64", or torch's own; "auto" is the
            checkpoint's.
        experts_algorithm: "auto", or one of Transformers' own: "eager", "batched_mm",
            "grouped_mm".
        kv_tokens: tokens (context x batch) of KV cache that a budget leaves room for; None is
            4096, or as many as the model has positions where those are fewer.
        check_host_memory: refuse before loading where the host seems to have too little memory.
        progress: called with (bytes of experts loaded, bytes in all).
        auto_class: the class whose `from_pretrained` loads; None is `AutoModelForCausalLM`.
        **from_pretrained: passed on to it (`revision`, `token`, `trust_remote_code`, ...); names of
            the configuration change its values. Remote code is refused unless
            `trust_remote_code=True`.

    Returns:
        The Transformers model, in evaluation mode, with an `expert_cache` (see `ExpertCache`).

    Raises:
        ConfigError: a size, policy or other option that cannot take effect.
        CheckpointError: the path does not exist, or its files are incomplete or corrupt.
        ModuleNotFoundError: a GGUF file, and the package that reads it is not installed.
        UnsupportedModelError: not an MoE model, or experts of an unknown form; the class is named.
        UnsupportedOperationError: `device_map`, `tp_plan` and their like.
        HostMemoryError: the host has too little memory, or may not page-lock as much.
        StorageError: a pack that cannot be read.
    """
    check_from_pretrained(from_pretrained)
    options = make_options(
        CacheConfig(
            parse_cache_size(expert_cache_size),
            policy,
            expert_store,
            cache_mode,
            check_host_memory,
            expert_packing,
            prefetch,
            ram_nbytes=gib_to_bytes(expert_ram_gib, "expert_ram_gib"),
            ram_policy=expert_ram_policy,
            pack=None if expert_pack is None else str(expert_pack),
            expert_dtype=expert_dtype,
        ),
        experts_algorithm,
        kv_tokens,
        progress,
    )
    where = find_device(device)
    dtype = find_dtype(dtype, from_pretrained.pop("torch_dtype", None))
    wants_info = from_pretrained.pop("output_loading_info", False)
    config, rest = read_config(path_or_id, from_pretrained)
    rest = {"use_safetensors": True, **rest, "config": config, "dtype": dtype}
    model, info = from_pretrained_by_us(path_or_id, options, auto_class, where, rest)
    _require_cache(model)
    require_complete(path_or_id, info)
    return (model, info) if wants_info else model


def attach(
    model: Any,
    *,
    expert_cache_size: int | str = "auto",
    policy: str = DEFAULT_POLICY,
    expert_packing: ExpertPacking = DEFAULT_PACKING,
    expert_dtype: ExpertDtype = "none",
    prefetch: Prefetch = "off",
    cache_mode: CacheMode = "auto",
    device: str | torch.device | None = None,
    experts_algorithm: experts.Algorithm = "auto",
    kv_tokens: int | None = None,
    check_host_memory: bool = True,
) -> Any:
    """Cache the experts of a model that is already in host memory.

    Its experts move into page-locked memory layer by layer, its other weights to the device.

    Args:
        model: a loaded Transformers model.
        expert_cache_size: as for `load`.
        policy: as for `load`.
        expert_packing: as for `load`.
        expert_dtype: as for `load`.
        prefetch: as for `load`.
        cache_mode: as for `load`.
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
        HostMemoryError: the host has too little memory, or may not page-lock as much. Where that
            shows only after the first layer was taken, the model is of no more use: load it again.
    """
    if hasattr(model, "expert_cache"):
        raise UnsupportedOperationError(
            "the model has an expert cache already: load it again to change it"
        )
    if len(set((getattr(model, "hf_device_map", None) or {"": ""}).values())) > 1:
        raise UnsupportedOperationError(
            "the model is spread by device_map: load it on the CPU, or use load()"
        )
    options = make_options(
        CacheConfig(
            parse_cache_size(expert_cache_size),
            policy,
            "ram",
            cache_mode,
            check_host_memory,
            expert_packing,
            prefetch,
            expert_dtype=expert_dtype,
        ),
        experts_algorithm,
        kv_tokens,
    )
    loading.attach(model, options, find_device(device))
    return model


def install(
    *,
    expert_cache_size: int | str = "auto",
    policy: str = DEFAULT_POLICY,
    expert_store: StoreKind = "ram",
    expert_ram_gib: float | None = None,
    expert_ram_policy: str = DEFAULT_RAM_POLICY,
    expert_pack: str | Path | None = None,
    expert_packing: ExpertPacking = DEFAULT_PACKING,
    expert_dtype: ExpertDtype = "none",
    prefetch: Prefetch = "off",
    cache_mode: CacheMode = "auto",
    experts_algorithm: experts.Algorithm = "auto",
    kv_tokens: int | None = None,
    check_host_memory: bool = True,
) -> None:
    """Let plain code use the cache: `from_pretrained(..., experts_implementation="hotexperts")`.

    Models that do not ask for it load as before. Calling again changes the options.

    Args:
        expert_cache_size: as for `load`.
        policy: as for `load`.
        expert_store: as for `load`.
        expert_ram_gib: as for `load`.
        expert_ram_policy: as for `load`.
        expert_pack: as for `load`.
        expert_packing: as for `load`.
        expert_dtype: as for `load`.
        prefetch: as for `load`.
        cache_mode: as for `load`.
        experts_algorithm: as for `load`.
        kv_tokens: as for `load`.
        check_host_memory: as for `load`.
    """
    loading.install(
        make_options(
            CacheConfig(
                parse_cache_size(expert_cache_size),
                policy,
                expert_store,
                cache_mode,
                check_host_memory,
                expert_packing,
                prefetch,
                ram_nbytes=gib_to_bytes(expert_ram_gib, "expert_ram_gib"),
                ram_policy=expert_ram_policy,
                pack=None if expert_pack is None else str(expert_pack),
                expert_dtype=expert_dtype,
            ),
            experts_algorithm,
            kv_tokens,
        )
    )


def _require_cache(model: Any) -> None:
    if not hasattr(model, "expert_cache"):
        raise UnsupportedModelError(
            f"{type(model).__name__} was loaded without an expert cache: it is not a "
            "Mixture-of-Experts model that hotexperts knows; load it with Transformers as it is"
        )
