"""Host memory that experts take: plain, quantised while loading, or in their checkpoint's codes."""

from __future__ import annotations

from collections.abc import Sequence

from hotexperts.cache.quantised import quantised_packings
from hotexperts.cache.store import RowForm
from hotexperts.config import CacheConfig
from hotexperts.integrations.transformers.checkpoint import ExpertCheckpoint
from hotexperts.integrations.transformers.coded import CodedExperts
from hotexperts.integrations.transformers.modules import ExpertsModule


def in_codes(
    found: Sequence[ExpertsModule], checkpoint: ExpertCheckpoint, cache: CacheConfig
) -> list[CodedExperts | None]:
    """Each layer's experts as the checkpoint quantised them; None where rows are made otherwise.

    Raises:
        CheckpointError: the checkpoint lacks a parameter.
    """
    is_otherwise = cache.expert_dtype != "none" or cache.packing == "packed12"
    if is_otherwise or not cache.has_page_locked_store:
        return [None] * len(found)
    return [checkpoint.coded(layer) for layer in found]


def dequantised(
    found: Sequence[ExpertsModule],
    coded: Sequence[CodedExperts | None],
    checkpoint: ExpertCheckpoint,
) -> str:
    """What experts are quantised by that become plain as they are read, as "GGUF Q4_K, GGUF Q6_K".

    Args:
        found: the experts modules.
        coded: as `in_codes` gave them.
        checkpoint: they come from.
    """
    kinds: set[str] = set()
    for layer, codes in zip(found, coded, strict=True):
        packings = [None] * len(layer.layout.names) if codes is None else codes.packings
        for name, packing in zip(layer.layout.names, packings, strict=True):
            if packing is None:
                kinds |= checkpoint.kinds(layer, name)
    return ", ".join(sorted(kinds))


def ram_nbytes(
    found: Sequence[ExpertsModule], coded: Sequence[CodedExperts | None], cache: CacheConfig
) -> int:
    """Host bytes of every expert's row in memory, as far as they are known before any is read.

    Raises:
        ConfigError: the experts cannot be quantised as asked.
    """
    return sum(
        layer.num_experts * _row_nbytes(layer, codes, cache)
        for layer, codes in zip(found, coded, strict=True)
    )


def _row_nbytes(layer: ExpertsModule, codes: CodedExperts | None, cache: CacheConfig) -> int:
    if cache.expert_dtype != "none":
        packings = quantised_packings(layer.layout, cache.expert_dtype)
        return RowForm.packed(layer.layout, packings).row_nbytes
    if codes is not None:
        return RowForm.packed(layer.layout, codes.packings).row_nbytes
    return layer.layout.row_nbytes
