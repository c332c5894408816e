"""From stores to a working model: capacity, slots, banks, the experts function, the guards."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hotexperts.cache import CachedWeightProvider, ExpertStore, StreamBanks
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.device_mode import check_options_for_kernels, choose_mode
from hotexperts.cache.host_memory import available_host_bytes, require_host_bytes
from hotexperts.cache.packed_store import check_packable
from hotexperts.cache.prefetch import make_lanes
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.cache.turn import Turn
from hotexperts.config import Bytes
from hotexperts.formats import ExpertLayout
from hotexperts.integrations.identity import model_digest
from hotexperts.integrations.transformers.experts import CachedExperts
from hotexperts.integrations.transformers.guard import guard
from hotexperts.integrations.transformers.handle import ExpertCache
from hotexperts.integrations.transformers.modules import ExpertsModule
from hotexperts.integrations.transformers.prefetching import give_guesses, prefetch_nbytes
from hotexperts.sizing import (
    LayerShape,
    SizePlan,
    bank_rows,
    capacity_for_budget,
    fixed_capacity,
)

if TYPE_CHECKING:
    from hotexperts.integrations.transformers.load import LoadOptions
    from hotexperts.integrations.transformers.store_maker import Stores

AUTO_SHARE = 0.9  # of the free memory
WORKSPACE_BYTES = 256 * 2**20  # activations of a prefill chunk and the matrix library's scratch


def attach_stores(
    model: Any,
    found: Sequence[ExpertsModule],
    made: Stores,
    plan: SizePlan,
    options: LoadOptions,
    device: torch.device,
    start: float,
    *,
    store_reason: str | None = None,
    dequantised: str = "",
) -> None:
    """Give every layer its cache, and the model its `expert_cache`.

    Args:
        model: parameters other than experts on `device`.
        found: its experts modules.
        made: their stores, one a module.
        plan: the capacity.
        options: the user's choices.
        device: where slots go.
        start: `time.perf_counter()` when loading began.
        store_reason: why the experts are where they are.
        dequantised: what they were quantised by that they no longer are.
    """
    stores, turn = made.of_layers, Turn(device)
    banks = _make_banks(found, stores, plan.capacity, device)
    providers: list[StreamingProvider] = []
    layers: list[CachedExperts] = []
    layouts = [store.layout for store in stores]
    chosen = choose_mode(options.cache, layouts, device, is_refused=made.refusal is not None)
    lanes = make_lanes(options.cache, chosen, stores, device)
    for layer, store in zip(found, stores, strict=True):
        make_provider: Any = CachedWeightProvider
        if chosen.mode == "device":
            lane = lanes.get(store.layout)
            make_provider = partial(DeviceWeightProvider, tells_pairs=True, lane=lane)
        provider = make_provider(
            store,
            plan.capacity,
            policy=options.cache.policy,
            device=device,
            banks=banks.get(store.layout),
            turn=turn,
        )
        layers.append(CachedExperts(layer.module, provider, device, options.algorithm))
        providers.append(provider)
    for this, following in itertools.pairwise(providers):
        if isinstance(this, DeviceWeightProvider) and isinstance(following, DeviceWeightProvider):
            this.next_provider = following
    if lanes:
        give_guesses(model, layers, found, options.cache.prefetch)
    model.eval()
    guard(model, [layer.module for layer in found])
    if not all(layer.is_capturable for layer in layers):
        _keep_cuda_graphs_away(model)
    model.expert_cache = ExpertCache(
        names=tuple(layer.name for layer in found),
        providers=tuple(providers),
        capacity=plan.capacity,
        policy=options.cache.policy,
        store=options.cache.store,
        held=made.held,
        mode=chosen.mode,
        mode_reason=chosen.reason,
        reason=plan.reason,
        banks=tuple(banks.values()),
        load_seconds=time.perf_counter() - start,
        store_reason=store_reason,
        dequantised=dequantised,
        prefetch=options.cache.prefetch,
        model=model_digest(model, (layer.name for layer in found)),
    )


def _make_banks(
    found: Sequence[ExpertsModule],
    stores: Sequence[ExpertStore],
    capacity: int,
    device: torch.device,
) -> dict[ExpertLayout, StreamBanks]:
    """Two banks for each kind of row, as large as the layer that needs most."""
    num_rows: dict[ExpertLayout, int] = {}
    for layer, store in zip(found, stores, strict=True):
        needed = bank_rows(layer.num_experts, capacity)
        num_rows[store.layout] = max(needed, num_rows.get(store.layout, 0))
    return {
        layout: StreamBanks(layout, count, device) for layout, count in num_rows.items() if count
    }


def check_early(
    model: Any,
    found: Sequence[ExpertsModule],
    options: LoadOptions,
    device: torch.device,
    needed_bytes: int,
) -> None:
    """Refuse what can be refused before anything is read.

    Args:
        model: with them; its weights may be on the meta device.
        found: the experts modules.
        options: the user's choices.
        device: where slots go.
        needed_bytes: host memory that the store takes beyond what is allocated now.

    Raises:
        ConfigError: more slots than experts, or a cache mode, a packing or a prefetch that cannot
            work here.
        HostMemoryError: the experts do not fit the host's memory.
    """
    if isinstance(options.cache.size, int):
        fixed_capacity(options.cache.size, _shapes(found))
    layouts = [layer.layout for layer in found]
    check_options_for_kernels(options.cache, choose_mode(options.cache, layouts, device))
    check_packable(options.cache, layouts)
    if options.cache.check_host_memory and options.cache.store != "disk":  # which was checked
        count = sum(layer.num_experts for layer in found)
        require_host_bytes(needed_bytes, f"keeping {count} experts in memory")


def plan_capacity(
    model: Any,
    found: Sequence[ExpertsModule],
    options: LoadOptions,
    device: torch.device,
    store_nbytes: int,
) -> SizePlan:
    """Slots a layer, as asked or as a budget allows.

    Args:
        model: its weights other than experts are on `device` already, or will go there.
        found: the experts modules.
        options: the user's choices.
        device: where slots go.
        store_nbytes: host memory that the stores will still take.

    Raises:
        ConfigError: more slots than experts, or a budget that is too small.
    """
    shapes = _shapes(found)
    size = options.cache.size
    if isinstance(size, int):
        return fixed_capacity(size, shapes)
    tensors = _other_tensors(model, found)
    weights = sum(tensor.nbytes for tensor in tensors)
    other = weights + _kv_nbytes(model.config, options.kv_tokens)
    if device.type == "cuda":
        other += WORKSPACE_BYTES
    ahead = prefetch_nbytes(model, found, options.cache.prefetch)
    if isinstance(size, Bytes):
        return capacity_for_budget(size.num_bytes, other, shapes, prefetch_bytes=ahead)
    free = _free_nbytes(device)
    if device.type == "cpu":  # slots and store share the memory
        free = max(0, free - store_nbytes)
    placed = sum(tensor.nbytes for tensor in tensors if tensor.device == device)
    total = int(AUTO_SHARE * free) + placed
    return capacity_for_budget(total, other, shapes, prefetch_bytes=ahead)


def _shapes(found: Sequence[ExpertsModule]) -> list[LayerShape]:
    return [LayerShape(x.num_experts, x.top_k, x.layout.row_nbytes) for x in found]


def _other_tensors(model: Any, found: Sequence[ExpertsModule]) -> list[torch.Tensor]:
    """Parameters and buffers that are no experts', tied ones once."""
    experts = {id(p) for layer in found for p in layer.module._parameters.values()}
    tensors = (*model.parameters(), *model.buffers())
    return [t for t in tensors if not t.is_meta and id(t) not in experts]


def _free_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def _kv_nbytes(config: Any, num_tokens: int) -> int:
    """Keys and values of every layer as if all were plain attention: an upper estimate."""
    text = config.get_text_config()
    query_heads = _largest(text, "num_attention_heads", 0)
    if not query_heads:  # a model without attention keeps no keys
        return 0
    heads = _largest(text, "num_key_value_heads", query_heads)
    head_dim = _largest(text, "head_dim", _largest(text, "hidden_size", 0) // query_heads)
    itemsize = getattr(getattr(text, "dtype", None), "itemsize", 2)
    layers = _largest(text, "num_hidden_layers", 0)
    return int(2 * layers * heads * head_dim * itemsize * num_tokens)


def _largest(config: Any, name: str, default: int) -> int:
    """A number of the configuration; some have one a layer, some leave it out."""
    value = getattr(config, name, None)
    if isinstance(value, list | tuple):
        value = max((x for x in value if isinstance(x, int)), default=None)
    return value if isinstance(value, int) and value > 0 else default


def _keep_cuda_graphs_away(model: Any) -> None:
    """The host decides in every layer, which a captured graph cannot replay."""
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.disable_compile = True
