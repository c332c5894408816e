"""Experts in host memory as codes and scales: quantised while loading, or by their checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from hotexperts.cache.packed_store import (
    CHUNK_NBYTES,
    PEAK,
    PackedBackingStore,
    fitting,
    lay_out_packed,
)
from hotexperts.cache.store import ExpertStore, RowForm, check_not_empty
from hotexperts.config import ExpertDtype
from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.formats import ExpertLayout, TensorSpec
from hotexperts.kernels.gather import codes
from hotexperts.kernels.gather.packing import Packing
from hotexperts.kernels.gather.scaled import Scaled, by_row

# Code, values of a row that share a scale. All scales are bf16: their range is the weights'.
_KINDS = {"fp8": (codes.E4M3, 128), "int8": (codes.INT8, 128), "int4": (codes.INT4, 32)}
_SCALE_BITS = 16
SLOT_DTYPES = (torch.bfloat16, torch.float16)
Packings: TypeAlias = tuple[Packing | None, ...]
Coded: TypeAlias = tuple[torch.Tensor, ...]  # codes, scales, zeros, as `Scaled.encode` takes them


class CodedSource(Protocol):
    """Reads experts that their checkpoint keeps as codes and scales.

    Attributes:
        kind: of the codes, for reports.
        layout: of a slot.
        num_experts: of the layer.
        packings: how each tensor lies in a row; None where it is plain.
    """

    kind: str
    layout: ExpertLayout
    num_experts: int
    packings: Packings

    def read(self, expert: int) -> Sequence[torch.Tensor | Coded]:
        """Each tensor `[1, *shape]`, or its codes and scales."""
        ...


def quantised_packings(layout: ExpertLayout, expert_dtype: ExpertDtype) -> Packings:
    """How each tensor of a row is quantised; None where it stays as it is.

    Raises:
        ConfigError: the slots' dtype is not one of 16 bits, or no tensor can be quantised.
    """
    code, group = _KINDS[expert_dtype]
    wide = [spec for spec in layout.specs if len(spec.shape) > 1 and spec.dtype not in SLOT_DTYPES]
    if wide:
        raise ConfigError(
            f"expert_dtype {expert_dtype!r} is for slots of 16 bits, and {wide[0].name!r} is "
            f"{str(wide[0].dtype).removeprefix('torch.')}: use dtype 'bfloat16'"
        )
    found: list[Packing | None] = []
    for spec in layout.specs:
        packing = None
        if is_matrix(spec):
            packing = by_row(code, spec.shape, group, _SCALE_BITS, spec.dtype)
        found.append(packing if packing is not None and pays(packing, spec) else None)
    if not any(found):
        shapes = [list(spec.shape) for spec in layout.specs]
        raise ConfigError(
            f"expert_dtype {expert_dtype!r} makes no tensor of shapes {shapes} smaller: use "
            "expert_dtype 'none'"
        )
    return tuple(found)


def is_matrix(spec: TensorSpec) -> bool:
    """Whether a tensor is of those that are quantised: no bias, and of 16 bits."""
    return len(spec.shape) > 1 and spec.dtype in SLOT_DTYPES and spec.nbytes > 0


def pays(packing: Scaled, spec: TensorSpec) -> bool:
    """Whether a tensor takes fewer bytes so."""
    return 4 * packing.num_words(spec.nbytes // 2) < spec.nbytes


def check_finite(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse what cannot be quantised before the first layer is; reads all of it.

    Args:
        tensors: stacked parameters `[E, *shape]`.

    Raises:
        CheckpointError: a matrix has values that are not finite.
    """
    for tensor in tensors:
        if tensor.dim() > 2 and not all(bool(expert.isfinite().all()) for expert in tensor):
            raise _not_finite()


def _not_finite() -> CheckpointError:
    return CheckpointError(
        "the experts have weights that are infinite or no numbers, which cannot be quantised: use "
        "expert_dtype 'none'"
    )


class QuantisedStore(PackedBackingStore):
    """Rows whose matrices are codes and scales.

    Attributes:
        relative_error: the root of the summed squares of what quantising changed, in parts of that
            of the matrices themselves; None where the checkpoint has the codes, and nothing is
            lost.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        num_experts: int,
        packings: Packings,
        kind: str,
        *,
        pin: bool = False,
        steps_back: bool = False,
    ) -> None:
        form = RowForm.packed(layout, packings)
        super().__init__(layout, num_experts, form, pin=pin, steps_back=steps_back)
        self.kind = kind
        self.relative_error: float | None = None

    @classmethod
    @torch.no_grad()
    def quantise(
        cls,
        source: ExpertStore | Mapping[str, torch.Tensor],
        device: torch.device,
        expert_dtype: ExpertDtype,
        *,
        pin: bool = False,
        steps_back: bool = False,
    ) -> QuantisedStore:
        """Quantise another store's rows, or stacked tensors `[E, *shape]`, a few at a time.

        Args:
            source: read once.
            device: where it is computed.
            expert_dtype: "fp8", "int8" or "int4".
            pin: page-lock the memory.
            steps_back: see `HostBuffer`; the host copies codes out of any memory.

        Raises:
            ConfigError: the device has no room for it, or the dtype is not for these tensors.
            CheckpointError: weights that are not finite.
        """
        if isinstance(source, Mapping):
            layout, num_experts = ExpertLayout.of(source)
        else:
            layout, num_experts = source.layout, source.num_experts
        check_not_empty(layout, num_experts)
        packings = quantised_packings(layout, expert_dtype)
        how = {"pin": pin, "steps_back": steps_back}
        store = cls(layout, num_experts, packings, expert_dtype, **how)
        step = min(num_experts, max(1, CHUNK_NBYTES // layout.row_nbytes))
        lost, whole, first = 0.0, 0.0, 0
        with fitting(PEAK * step * layout.row_nbytes, "expert_dtype 'none'"):
            for part in _chunks(source, layout, step, device):
                rows = lay_out_packed(store.form, part)
                store.rows[first : first + len(rows)].copy_(rows)
                changed, size = _squares(store.form, rows, part)
                lost, whole = lost + changed, whole + size
                first += len(rows)
        if not math.isfinite(lost):
            raise _not_finite()
        store.relative_error = math.sqrt(lost / whole) if whole else 0.0
        return store

    @classmethod
    @torch.no_grad()
    def of_codes(
        cls,
        source: CodedSource,
        device: torch.device,
        *,
        pin: bool = False,
        steps_back: bool = False,
        after_each: Callable[[int], None] = lambda expert: None,
    ) -> QuantisedStore:
        """Lay out what a checkpoint quantised, without loss; the device does it.

        Raises:
            ConfigError: the device has no room for an expert.
        """
        about = source.layout, source.num_experts, source.packings, source.kind
        store = cls(*about, pin=pin, steps_back=steps_back)
        with fitting(PEAK * source.layout.row_nbytes, "expert_store 'file'"):
            for expert in range(source.num_experts):
                parts = zip(source.read(expert), store.form.parts(store.rows[expert]), strict=True)
                for tensor, (packing, target) in parts:
                    if isinstance(tensor, tuple):
                        assert isinstance(packing, Scaled), "codes have a packing"
                        found = packing.encode(*(part.to(device) for part in tensor))
                    else:
                        found = tensor.contiguous()
                    target.copy_(found.reshape(-1).view(torch.uint8))
                after_each(expert)
        return store

    def could_pack(self, spec: TensorSpec) -> bool:
        """See `PackedBackingStore.could_pack`."""
        return is_matrix(spec)

    def describe_loss(self, stores: Sequence[Any]) -> str:
        """The layers' errors, or that the checkpoint has the codes."""
        errors = [store.relative_error for store in stores if store.relative_error is not None]
        if not errors:
            return ", as the checkpoint has them"
        return f", lossy: relative error {min(errors):.2g} to {max(errors):.2g} a layer"


def _chunks(
    source: ExpertStore | Mapping[str, torch.Tensor],
    layout: ExpertLayout,
    step: int,
    device: torch.device,
) -> Iterator[Sequence[torch.Tensor]]:
    """Each tensor of a few experts, on the device."""
    if isinstance(source, Mapping):
        num_experts = len(next(iter(source.values())))
        for first in range(0, num_experts, step):
            yield [t[first : first + step].detach().to(device) for t in source.values()]
        return
    _, staged = layout.allocate(step, device)
    for first in range(0, source.num_experts, step):
        count = min(step, source.num_experts - first)
        for i in range(count):
            source.copy_into(first + i, [tensor[i] for tensor in staged])
        yield [tensor[:count] for tensor in staged]


def _squares(
    form: RowForm, rows: torch.Tensor, part: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Summed squares of what changed, and of what there was, in the packed tensors."""
    lost = whole = 0.0
    for tensor, offset, size, packing in zip(
        part, form.offsets, form.sizes, form.packings, strict=True
    ):
        if packing is None:
            continue
        words = rows[:, offset : offset + size].contiguous().view(torch.int32)
        was = tensor.flatten(1).float()
        now = packing.unpack(words, was.shape[1]).float()
        lost += float((now - was).square().sum(dtype=torch.float64))
        whole += float(was.square().sum(dtype=torch.float64))
    return lost, whole
