"""Loading: experts go to a store, everything else to the device, nothing twice.

Transformers calls `PreTrainedModel._load_pretrained_model` when the model exists on the meta
device and the files are known. A hook there takes the experts' parameters out, so that their
checkpoint tensors are never read by Transformers, and then gives each layer a cache.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import nn

from hotexperts.cache import ExpertStore
from hotexperts.cache.quantised import check_finite
from hotexperts.config import DEFAULT_KV_TOKENS, CacheConfig
from hotexperts.errors import CheckpointError, HostMemoryError, UnsupportedOperationError
from hotexperts.integrations.transformers import compat, experts
from hotexperts.integrations.transformers.build import (
    attach_stores,
    check_early,
    plan_capacity,
)
from hotexperts.integrations.transformers.checkpoint import ExpertCheckpoint
from hotexperts.integrations.transformers.modules import (
    ExpertsModule,
    find_experts,
    take_parameters,
)
from hotexperts.integrations.transformers.plain_view import is_read_here, open_files
from hotexperts.integrations.transformers.positions import within_positions
from hotexperts.integrations.transformers.row_forms import dequantised, in_codes, ram_nbytes
from hotexperts.integrations.transformers.store_maker import StoreMaker, make_stores, on
from hotexperts.integrations.transformers.tiers import choose_tier

Progress = Callable[[int, int], None]
Instead = Callable[[Sequence[ExpertsModule], ExpertCheckpoint, Sequence[Path]], NoReturn]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What `load`, `attach` and `install` may choose.

    Attributes:
        cache: size, policy and store of the experts.
        algorithm: see `CachedExperts`.
        kv_tokens: tokens of KV cache to leave room for when the size is a budget or "auto".
        is_kv_chosen: the user gave them; else the model's positions limit them.
        progress: called with (bytes of experts loaded, bytes in all).
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    algorithm: experts.Algorithm = "auto"
    kv_tokens: int = DEFAULT_KV_TOKENS
    is_kv_chosen: bool = False
    progress: Progress = lambda done, total: None


@dataclass(slots=True)
class Pending:
    """A load in progress.

    Attributes:
        options: the user's choices.
        found_files: whether Transformers has found the configuration and every file.
        instead: called with the experts, their checkpoint and its files, and nothing is loaded
            then: it does not return.
    """

    options: LoadOptions
    found_files: bool = False
    instead: Instead | None = None


_pending: ContextVar[Pending | None] = ContextVar("hotexperts_pending_load", default=None)
_defaults = LoadOptions()


def install(options: LoadOptions) -> None:
    """Hook into Transformers; models that ask for "hotexperts" experts use `options`."""
    global _defaults
    _defaults = options
    experts.register()
    hook_loading()


def hook_loading() -> None:
    """Let `from_pretrained` come by here, once; other models load as before."""
    base = compat.names().base_model
    if getattr(base._load_pretrained_model, "_hotexperts", False):
        return
    original = base._load_pretrained_model

    def hook(model: Any, state_dict: Any, files: Any, load_config: Any, *rest: Any) -> Any:
        if model.config._experts_implementation != experts.NAME:
            if is_read_here(model.config):
                state_dict = open_files(model, files).state_dict
            return original(model, state_dict, files, load_config, *rest)
        pending = _pending.get() or Pending(_defaults)
        pending.found_files = True
        return _load(original, pending, model, state_dict, files, load_config, *rest)

    hook._hotexperts = True  # type: ignore[attr-defined]
    base._load_pretrained_model = staticmethod(hook)


@contextmanager
def pending(options: LoadOptions, instead: Instead | None = None) -> Iterator[Pending]:
    """Inside, this thread's `from_pretrained` uses `options`, or does something else instead."""
    install(_defaults)
    load = Pending(options, instead=instead)
    token = _pending.set(load)
    try:
        yield load
    finally:
        _pending.reset(token)


def _load(
    original: Callable[..., Any],
    pending: Pending,
    model: Any,
    state_dict: Any,
    files: Any,
    load_config: Any,
    *rest: Any,
) -> Any:
    start = time.perf_counter()
    device = _single_device(load_config)
    is_plain = state_dict is None and files and str(files[0]).endswith(".safetensors")
    if not is_plain and not is_read_here(model.config):
        raise CheckpointError(
            "from_pretrained with an expert cache reads safetensors files only: convert the "
            "checkpoint (save_pretrained writes safetensors), or give a GGUF file's path to load()"
        )
    found = find_experts(model)
    paths, file_of, state_dict = open_files(model, files)
    checkpoint = ExpertCheckpoint(model, file_of, load_config.weight_mapping or [])
    if pending.instead is not None:
        pending.instead(found, checkpoint, paths)
    coded = in_codes(found, checkpoint, pending.options.cache)
    needed = ram_nbytes(found, coded, pending.options.cache)
    tier = choose_tier(found, needed, pending.options.cache, paths)
    if tier.store != "ram":  # rows of files are plain
        coded = [None] * len(found)
    options = replace(pending.options, cache=tier.config(pending.options.cache))
    check_early(model, found, options, device, tier.ram_nbytes)
    model._keys_to_ignore_on_load_unexpected = _ignored(model, found)
    for layer in found:
        take_parameters(layer.module)
    try:
        result = original(model, state_dict, files, load_config, *rest)
    except SafetensorError as error:
        raise CheckpointError(
            f"{paths[0].parent}: cannot be read ({error}): download it again"
        ) from error
    except RuntimeError as error:
        if "unable to mmap" not in str(error):  # the safetensors package maps for writing
            raise
        raise HostMemoryError(
            f"{error}: a file is larger than the memory; write the checkpoint in smaller ones "
            "(save_pretrained(max_shard_size='5GB'))"
        ) from error
    options = within_positions(options, model.config)
    plan = plan_capacity(model, found, options, device, tier.ram_nbytes)
    stores = make_stores(found, coded, checkpoint, options, device, plan.capacity, tier)
    attach_stores(
        model,
        found,
        stores,
        plan,
        options,
        device,
        start,
        store_reason=tier.reason,
        dequantised=dequantised(found, coded, checkpoint),
    )
    return result


def attach(model: Any, options: LoadOptions, device: torch.device) -> None:
    """Move a loaded model's experts into stores, one layer at a time, and cache them."""
    start = time.perf_counter()
    if options.cache.store != "ram":
        raise UnsupportedOperationError(
            "attach() copies experts that are in memory: use load() to leave them in the file or "
            "on disk"
        )
    if any(tensor.is_meta for tensor in model.parameters()):
        raise UnsupportedOperationError(
            "the model holds no weights (they are on the meta device): load them first, or use "
            "load()"
        )
    found = find_experts(model)
    largest = max(ram_nbytes([layer], [None], options.cache) for layer in found)
    check_early(model, found, options, device, largest)
    if options.cache.expert_dtype != "none":  # no layer is taken before it is known of all
        for layer in found:
            check_finite(getattr(layer.module, spec.name) for spec in layer.layout.specs)
    options = within_positions(options, model.config)
    plan = plan_capacity(model, found, options, device, 0)
    made: list[ExpertStore] = []
    with on(device):
        maker = StoreMaker.for_model(found, options.cache, device, plan.capacity)
        for layer in found:
            parameters = take_parameters(layer.module)
            made.append(maker.from_tensors(parameters))
            parameters.clear()
        stores = maker.settled(made)
    nn.Module.to(model, device)
    experts.register()
    model.set_experts_implementation(experts.NAME)
    attach_stores(model, found, stores, plan, options, device, start)


def _single_device(load_config: Any) -> torch.device:
    if getattr(load_config, "device_mesh", None) is not None:
        raise UnsupportedOperationError(
            "tp_plan and device meshes do not work with an expert cache: use one GPU"
        )
    devices = set((load_config.device_map or {"": "cpu"}).values())
    if len(devices) != 1:
        raise UnsupportedOperationError(
            f"device_map places the model on {sorted(map(str, devices))}, and an expert cache "
            'needs one device: give one, such as device_map="cuda"'
        )
    (where,) = devices
    try:
        device = torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
    except RuntimeError:  # "disk", which is no device
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedOperationError(f"device {where} is not supported: use cuda or cpu")
    return device


def _ignored(model: Any, found: Sequence[ExpertsModule]) -> set[str]:
    """Patterns of checkpoint keys that Transformers must not call unexpected."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    prefix = f"{model.base_model_prefix}."
    for layer in found:
        patterns.add(re.escape(layer.name.removeprefix(prefix)) + r"\.")
    return patterns
