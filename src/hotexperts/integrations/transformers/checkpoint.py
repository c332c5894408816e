"""Which checkpoint tensors make each expert, found with Transformers' own renaming rules.

Per-expert and stacked tensors are read as views of the mapped file. Whatever else a model's
conversion does (transposing, interleaving, dequantising fp8 or mxfp4) runs through Transformers'
own converter, one expert at a time; what rows can hold in codes is read without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hotexperts.cache import FileStore
from hotexperts.cache.file_store import PinnedBounce
from hotexperts.cache.parallel_read import Span
from hotexperts.errors import CheckpointError
from hotexperts.formats import TensorSpec
from hotexperts.integrations.transformers import compat
from hotexperts.integrations.transformers.coded import (
    CodedExperts,
    CodedParameter,
    coded_parameter,
)
from hotexperts.integrations.transformers.integers import integer_parameter
from hotexperts.integrations.transformers.modules import ExpertsModule
from hotexperts.integrations.transformers.plain_view import TensorFile, check_left_out
from hotexperts.integrations.transformers.sources import (
    ModelOfOneExpert,
    ParameterSources,
    Source,
    expert_number,
    one_expert,
    place,
    view,
)


class ExpertCheckpoint:
    """The expert tensors of a sharded checkpoint.

    Args:
        model: on the meta device, parameters in place, quantiser applied.
        file_of: the file of each tensor, see `open_files`.
        weight_mapping: Transformers' renamings and converters for this model.

    Raises:
        CheckpointError: a bias that the model has no place for.
    """

    def __init__(
        self, model: Any, file_of: Mapping[str, TensorFile], weight_mapping: Sequence[Any]
    ) -> None:
        self._model = ModelOfOneExpert(model)
        self._config = model.config
        self._sources: dict[str, ParameterSources] = defaultdict(ParameterSources)
        found = compat.names()
        renamings = [entry for entry in weight_mapping if isinstance(entry, found.renaming)]
        converters = [entry for entry in weight_mapping if isinstance(entry, found.converter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        meta = model.state_dict()
        for key in sorted(file_of, key=found.natural_key):
            target, pattern = found.rename_source_key(
                key, renamings, converters, model.base_model_prefix, meta
            )
            if target not in meta and key in meta:
                target, pattern = key, None
            if target not in meta:
                check_left_out(key, file_of)
            entry = self._sources[target]
            renamed, _ = found.rename_source_key(key, renamings, [])
            number = expert_number(renamed, pattern or "")
            entry.by_pattern.setdefault(pattern or key, []).append(
                Source(file_of[key], key, number)
            )
            if pattern is not None:
                entry.converter = by_pattern[pattern]

    def store(
        self,
        experts: ExpertsModule,
        *,
        bounce: PinnedBounce | None = None,
        release_pages: bool = False,
    ) -> FileStore:
        """A store of one layer's experts that reads this checkpoint.

        Args:
            experts: the layer.
            bounce: page-locked rows to copy through, on CUDA.
            release_pages: hand each expert's pages back after reading it, for reading once.

        Raises:
            CheckpointError: the checkpoint lacks a parameter.
            UnsupportedModelError: a parameter is stored in a way that mixes experts.
        """
        self._model.add(experts)
        entries = [self._entry(experts, name) for name in experts.layout.names]
        readers = [
            self._reader(experts, name, entry)
            for name, entry in zip(experts.layout.names, entries, strict=True)
        ]

        def release(expert: int) -> None:
            for entry in entries:
                entry.release(expert, experts.num_experts)

        store = FileStore(
            experts.layout,
            experts.num_experts,
            lambda expert: [reader(expert) for reader in readers],
            release=release if release_pages else lambda expert: None,
            bounce=bounce,
        )
        store.check(0)
        return store

    def spans(self, experts: ExpertsModule, rows: torch.Tensor) -> list[Span] | None:
        """Where each byte of a layer's rows is read from, of a layer that `store` has checked.

        Args:
            experts: the layer.
            rows: uint8 `[E, row_nbytes]`, for the spans to go to.

        Returns:
            None where rows are more than the files' bytes in another order.
        """
        found: list[Span] = []
        specs, offsets = experts.layout.specs, experts.layout.offsets
        for spec, offset in zip(specs, offsets, strict=True):
            pieces = _pieces(self._entry(experts, spec.name))
            if pieces is None or any(s.dtype != spec.dtype for p in pieces for s in p):
                return None
            for expert in range(experts.num_experts):
                at = offset
                for sources in pieces:
                    file, begin, end = place(sources, expert, experts.num_experts)
                    found.append(Span(file.path, begin, rows[expert, at : at + end - begin]))
                    at += end - begin
        return found

    def coded(self, experts: ExpertsModule) -> CodedExperts | None:
        """One layer's experts as they are quantised here; None where they are not, or otherwise.

        Raises:
            CheckpointError: the checkpoint lacks a parameter.
            UnsupportedModelError: a parameter is stored in a way that mixes experts.
        """
        self._model.add(experts)
        entries = [self._entry(experts, name) for name in experts.layout.names]
        found: list[Any] = []
        for spec, entry in zip(experts.layout.specs, entries, strict=True):
            reader = self._reader(experts, spec.name, entry)
            coded = coded_parameter(spec, entry) or integer_parameter(spec, _pieces(entry))
            found.append(coded or partial(_whole, spec, reader))
        if not any(isinstance(parameter, CodedParameter) for parameter in found):
            return None

        def release(expert: int) -> None:
            for entry in entries:
                entry.release(expert, experts.num_experts)

        return CodedExperts(experts.layout, experts.num_experts, tuple(found), release)

    def kinds(self, experts: ExpertsModule, name: str) -> set[str]:
        """How a parameter is quantised here, of those that are read as their numbers."""
        every = self._entry(experts, name).by_pattern.values()
        dtypes = {source.dtype for sources in every for source in sources}
        return {dtype for dtype in dtypes if isinstance(dtype, str)}

    def _entry(self, experts: ExpertsModule, name: str) -> ParameterSources:
        target = f"{experts.name}.{name}"
        if target not in self._sources:
            raise CheckpointError(
                f"the checkpoint has no tensors for {target}: it is incomplete, or of another model"
            )
        entry = self._sources[target]
        stacks = entry.converter is not None and compat.only_stacks(entry.converter.operations)
        needed = entry.converter.source_patterns if stacks else ()  # others may be optional
        missing = [pattern for pattern in needed if pattern not in entry.by_pattern]
        if missing:
            raise CheckpointError(
                f"the checkpoint is incomplete: {target} needs tensors named {', '.join(missing)}"
            )
        entry.check(target, experts.num_experts)
        entry.check_scaled()
        return entry

    def _reader(self, experts: ExpertsModule, name: str, entry: ParameterSources) -> Any:
        pieces = _pieces(entry)
        if pieces is not None:
            return partial(_views, pieces)
        return partial(self._convert, f"{experts.name}.{name}", entry)

    def _convert(self, target: str, entry: ParameterSources, expert: int) -> list[torch.Tensor]:
        """One expert through Transformers' converter, as a layer with a single expert."""
        tensors: Any = {
            pattern: one_expert(sources, expert) for pattern, sources in entry.by_pattern.items()
        }
        converter = entry.converter
        try:
            for operation in converter.operations:
                tensors = operation.convert(
                    tensors,
                    source_patterns=converter.source_patterns,
                    target_patterns=converter.target_patterns,
                    full_layer_name=target,
                    model=self._model,
                    config=self._config,
                    missing_keys=None,
                )
        except (AssertionError, LookupError, RuntimeError, ValueError) as error:
            raise entry.unreadable(target, expert, error) from error
        (value,) = (v for k, v in tensors.items() if len(tensors) == 1 or k in target)
        value = value[0] if isinstance(value, list) else value
        return [value[0]]


def _pieces(entry: ParameterSources) -> list[list[Source]] | None:
    """What a tensor is joined from, in order; None where it takes more than joining."""
    if entry.converter is None:
        return list(entry.by_pattern.values())
    if not compat.only_stacks(entry.converter.operations):
        return None
    return [entry.by_pattern[pattern] for pattern in entry.converter.source_patterns]


def _views(sources_of_all: list[list[Source]], expert: int) -> list[torch.Tensor]:
    return [view(sources, expert)[0] for sources in sources_of_all]


def _whole(spec: TensorSpec, reader: Any, expert: int) -> torch.Tensor:
    """A plain parameter in the slots' dtype, its pieces joined."""
    return torch.cat(list(reader(expert))).to(spec.dtype).reshape(spec.shape)
