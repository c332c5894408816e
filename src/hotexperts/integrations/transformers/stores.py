"""One store a layer: which form its experts take in host memory, and the store itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hotexperts.cache import CPUBackingStore, ExpertStore
from hotexperts.cache.device_mode import choose_mode
from hotexperts.cache.file_store import PinnedBounce
from hotexperts.cache.packed_store import PackedBackingStore, packs
from hotexperts.cache.quantised import QuantisedStore, quantised_packings
from hotexperts.cache.store import RowForm
from hotexperts.integrations.transformers.checkpoint import ExpertCheckpoint
from hotexperts.integrations.transformers.coded import CodedExperts
from hotexperts.integrations.transformers.modules import ExpertsModule, take_parameters

if TYPE_CHECKING:
    from hotexperts.integrations.transformers.load import LoadOptions


def in_codes(
    found: Sequence[ExpertsModule], checkpoint: ExpertCheckpoint, options: LoadOptions
) -> list[CodedExperts | None]:
    """Each layer's experts as the checkpoint quantised them; None where rows are made otherwise.

    Raises:
        CheckpointError: the checkpoint lacks a parameter.
    """
    cache = options.cache
    if cache.store != "ram" or cache.expert_dtype != "none" or cache.packing == "packed12":
        return [None] * len(found)
    return [checkpoint.coded(layer) for layer in found]


def ram_nbytes(
    found: Sequence[ExpertsModule], coded: Sequence[CodedExperts | None], options: LoadOptions
) -> int:
    """Host bytes of every expert's row, as far as they are known before any is read.

    Raises:
        ConfigError: the experts cannot be quantised as asked.
    """
    if options.cache.store != "ram":
        return 0
    return sum(
        layer.num_experts * _row_nbytes(layer, codes, options)
        for layer, codes in zip(found, coded, strict=True)
    )


def _row_nbytes(layer: ExpertsModule, codes: CodedExperts | None, options: LoadOptions) -> int:
    if options.cache.expert_dtype != "none":
        packings = quantised_packings(layer.layout, options.cache.expert_dtype)
        return RowForm.packed(layer.layout, packings).row_nbytes
    if codes is not None:
        return RowForm.packed(layer.layout, codes.packings).row_nbytes
    return layer.layout.row_nbytes


def make_stores(
    found: Sequence[ExpertsModule],
    coded: Sequence[CodedExperts | None],
    checkpoint: ExpertCheckpoint,
    options: LoadOptions,
    device: torch.device,
    capacity: int,
) -> list[ExpertStore]:
    """One store a layer, in memory or in the file, as the options say."""
    pin = device.type == "cuda"
    is_packed = _is_packed(found, options, device, capacity)
    if options.cache.store == "file":
        bounce = PinnedBounce(max(x.layout.row_nbytes for x in found)) if pin else None
        return [checkpoint.store(layer, bounce=bounce) for layer in found]
    num_experts = sum(layer.num_experts for layer in found)
    done = 0
    stores: list[ExpertStore] = []
    for layer, codes in zip(found, coded, strict=True):

        def report(expert: int, before: int = done) -> None:
            options.progress(before + expert + 1, num_experts)

        if codes is not None:

            def release(expert: int, of: CodedExperts = codes, tell: Tell = report) -> None:
                of.release(expert)
                tell(expert)

            stores.append(QuantisedStore.of_codes(codes, device, pin=pin, after_each=release))
        else:
            source = checkpoint.store(layer, release_pages=True)
            stores.append(_copied(source, options, device, is_packed=is_packed, tell=report))
        done += layer.num_experts
    return stores


Tell = Callable[[int], None]


def _copied(
    source: ExpertStore,
    options: LoadOptions,
    device: torch.device,
    *,
    is_packed: bool,
    tell: Tell,
) -> ExpertStore:
    """A store in memory, from one that reads the file."""
    pin, expert_dtype = device.type == "cuda", options.cache.expert_dtype
    if expert_dtype != "none":
        return QuantisedStore.quantise(source, device, expert_dtype, pin=pin, after_each=tell)
    if is_packed:
        return PackedBackingStore.from_store(source, device, pin=pin, after_each=tell)
    return CPUBackingStore.from_store(source, pin=pin, after_each=tell)


def take_stores(
    found: Sequence[ExpertsModule], options: LoadOptions, device: torch.device, capacity: int
) -> list[ExpertStore]:
    """Stores of a loaded model's experts, which leave their modules one layer at a time."""
    stores: list[ExpertStore] = []
    pin, expert_dtype = device.type == "cuda", options.cache.expert_dtype
    is_packed = _is_packed(found, options, device, capacity)
    for layer in found:
        parameters = take_parameters(layer.module)
        if expert_dtype != "none":
            stores.append(QuantisedStore.quantise(parameters, device, expert_dtype, pin=pin))
        elif is_packed:
            stores.append(PackedBackingStore.from_tensors(parameters, device, pin=pin))
        else:
            stores.append(CPUBackingStore.from_tensors(parameters, pin=pin))
        parameters.clear()
    return stores


def _is_packed(
    found: Sequence[ExpertsModule], options: LoadOptions, device: torch.device, capacity: int
) -> bool:
    mode = choose_mode(options.cache, [layer.layout for layer in found], device)
    is_full = capacity >= max(layer.num_experts for layer in found)
    return packs(options.cache, mode, device, is_full=is_full)
