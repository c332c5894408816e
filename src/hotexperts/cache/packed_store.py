"""Rows in host memory whose tensors are packed, which whoever copies them unpacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from hotexperts.cache.device_mode import ChosenMode, check_options_for_kernels
from hotexperts.cache.host_memory import HostBuffer
from hotexperts.cache.link import probed_gb_s
from hotexperts.cache.page_lock import Held
from hotexperts.cache.store import ExpertStore, RowForm, check_not_empty
from hotexperts.config import AUTO, FAST_LINK_GB_S, CacheConfig, format_bytes
from hotexperts.errors import ConfigError
from hotexperts.formats import ExpertLayout, TensorSpec
from hotexperts.kernels.gather import packed12
from hotexperts.kernels.gather.packed12 import Packed12
from hotexperts.kernels.gather.packing import Packing

CHUNK_NBYTES = 1 << 24  # of plain rows that are packed at once
PEAK = 12  # times as much memory it takes
Chunks: TypeAlias = Callable[[], Iterator[Sequence[torch.Tensor]]]  # tensors [n, *shape] each


class PackedBackingStore:
    """Every row in host memory, its tensors packed where that pays.

    Where `packed12` packs, a tensor stays plain if a block of it has too many exceptions for the
    largest room (`packed12.ROOMS`), 1.6 % of its values, and if it is so small that blocks make it
    larger.

    Attributes:
        rows: uint8 `[E, form.row_nbytes]`.
        form: how a row lies in them.
        kind: of the packing, for reports.

    Raises:
        HostMemoryError: the memory, or its page-locking, is refused.
    """

    kind = "packed12"

    def __init__(
        self,
        layout: ExpertLayout,
        num_experts: int,
        form: RowForm,
        *,
        pin: bool = False,
        steps_back: bool = False,
    ) -> None:
        self.layout = layout
        self.num_experts = num_experts
        self.form = form
        nbytes = num_experts * form.row_nbytes
        self.buffer = HostBuffer(nbytes, pin=pin, steps_back=steps_back)
        self.rows = self.buffer.bytes.view(num_experts, form.row_nbytes)

    @classmethod
    @torch.no_grad()
    def from_store(
        cls,
        source: ExpertStore,
        device: torch.device,
        *,
        pin: bool = False,
        after_each: Callable[[int], None] = lambda expert: None,
    ) -> PackedBackingStore:
        """Bring another store's rows to a device and pack them there.

        Args:
            source: read once.
            device: it holds all of them meanwhile.
            pin: page-lock the memory.
            after_each: called with each expert that was read.

        Raises:
            ConfigError: the device has no room for them.
        """
        with fitting(source.num_experts * source.layout.nbytes, "expert_packing 'none'"):
            _, staged = source.layout.allocate(source.num_experts, device)
        for expert in range(source.num_experts):
            source.copy_into(expert, [tensor[expert] for tensor in staged])
            after_each(expert)
        return cls.from_tensors(staged._asdict(), device, pin=pin)

    @classmethod
    @torch.no_grad()
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], device: torch.device, *, pin: bool = False
    ) -> PackedBackingStore:
        """Pack stacked tensors `[E, *shape]` on a device, a few experts at a time.

        Raises:
            UnsupportedModelError: a tensor without an expert dimension, sizes that differ, or
                nothing to store.
            ConfigError: the device has no room to pack in.
        """
        layout, num_experts = ExpertLayout.of(tensors)
        check_not_empty(layout, num_experts)
        step = max(1, CHUNK_NBYTES // layout.row_nbytes)

        def chunks() -> Iterator[Sequence[torch.Tensor]]:
            for first in range(0, num_experts, step):
                yield [t[first : first + step].detach().to(device) for t in tensors.values()]

        first = 0
        with fitting(PEAK * min(step, num_experts) * layout.row_nbytes, "expert_packing 'none'"):
            form = RowForm.packed(layout, choose_packings(layout, chunks))
            store = cls(layout, num_experts, form, pin=pin)
            for part in chunks():
                rows = store.rows[first : first + len(part[0])]
                rows.copy_(lay_out_packed(store.form, part))
                first += len(rows)
        return store

    @property
    def host_nbytes(self) -> int:
        """Bytes of `rows`."""
        return self.rows.numel()

    @property
    def is_pinned(self) -> bool:
        """Whether the GPU reads the rows itself."""
        return self.buffer.held is Held.PAGE_LOCKED

    def could_pack(self, spec: TensorSpec) -> bool:
        """Whether a tensor is of those that are packed where it pays."""
        return spec.dtype == torch.bfloat16 and spec.nbytes > 0

    def describe_loss(self, stores: Sequence[Any]) -> str:
        """What layers kept like this one lose, for a report; nothing here."""
        return ""

    @torch.no_grad()
    def copy_into(self, expert: int, tensors: Sequence[torch.Tensor]) -> None:
        """Unpack one row into tensors, on their device."""
        row = self.rows[expert].to(tensors[0].device, non_blocking=self.is_pinned)
        for target, part in zip(tensors, self.form.parts(row), strict=True):
            packing, words = part
            if packing is None:
                target.copy_(words[: target.nbytes].view(target.dtype).view(target.shape))
            else:
                found = packing.unpack(words.view(torch.int32).unsqueeze(0), target.numel())
                target.copy_(found.view(target.shape))


@contextmanager
def fitting(nbytes: int, remedy: str) -> Iterator[None]:
    """Inside, so much of the device's memory is taken, or it is said what to use instead.

    Raises:
        ConfigError: the device has not as much.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"packing takes {format_bytes(nbytes)} of the GPU while a layer is loaded, which it "
            f"has not: use {remedy}"
        ) from error


def choose_packings(layout: ExpertLayout, chunks: Chunks) -> tuple[Packing | None, ...]:
    """For each tensor its packing, or None where it stays plain; reads the chunks twice."""
    is_bf16 = [spec.dtype == torch.bfloat16 and spec.nbytes > 0 for spec in layout.specs]
    counts: dict[int, Any] = dict.fromkeys((i for i, packs in enumerate(is_bf16) if packs), 0)
    for tensors in chunks():
        for i in counts:
            counts[i] = counts[i] + packed12.exponents(tensors[i])
    bases = {i: packed12.window(count) for i, count in counts.items()}
    most = dict.fromkeys(bases, 0)
    for tensors in chunks():
        for i, base in bases.items():
            most[i] = max(most[i], packed12.most_exceptions(_flat(tensors[i]), base))
    return tuple(
        _packing_that_pays(spec.nbytes, bases[i], most[i]) if i in most else None
        for i, spec in enumerate(layout.specs)
    )


def _packing_that_pays(nbytes: int, base: int, num_exceptions: int) -> Packed12 | None:
    rooms = [room for room in packed12.ROOMS if room >= num_exceptions]
    packing = Packed12(base, rooms[0]) if rooms else None
    if packing is None or 4 * packing.num_words(nbytes // 2) >= nbytes:
        return None
    return packing


def lay_out_packed(form: RowForm, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows, uint8 `[n, row_nbytes]`, on the tensors' device."""
    device = tensors[0].device
    rows = torch.zeros(len(tensors[0]), form.row_nbytes, dtype=torch.uint8, device=device)
    for tensor, offset, size, packing in zip(
        tensors, form.offsets, form.sizes, form.packings, strict=True
    ):
        if size == 0:
            continue
        flat = _flat(tensor)
        found = flat.contiguous() if packing is None else packing.pack(flat)
        rows[:, offset : offset + size] = found.view(torch.uint8)
    return rows


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """`[n, *shape]` as `[n, numel]`; one number an expert has no shape."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)


def packs(cache: CacheConfig, mode: ChosenMode, device: torch.device, *, is_full: bool) -> bool:
    """Whether to pack; left to itself, where the link is what decode waits for.

    Args:
        cache: the user's choices.
        mode: who manages the caches.
        device: where slots are.
        is_full: every expert has a slot, so that nothing will be copied for long.

    Raises:
        ConfigError: it was asked for, and no kernel manages the cache.
    """
    if cache.packing == "packed12":
        check_options_for_kernels(cache, mode)
    if cache.packing == AUTO:
        is_copied = mode.mode == "device" and device.type == "cuda" and not is_full
        return is_copied and probed_gb_s(device) < FAST_LINK_GB_S
    return cache.packing == "packed12"


def check_packable(cache: CacheConfig, layouts: Sequence[ExpertLayout]) -> None:
    """Refuse to pack where there is nothing of the dtype that is packed.

    Args:
        cache: the user's choices.
        layouts: of every layer's experts.

    Raises:
        ConfigError: packing is asked for, and no tensor is bfloat16.
    """
    dtypes = {spec.dtype for layout in layouts for spec in layout.specs}
    if cache.packing == "packed12" and torch.bfloat16 not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(
            f"expert_packing 'packed12' packs bfloat16, and the experts here are {names}: use "
            "expert_packing 'none'"
        )


def describe_packing(stores: Sequence[ExpertStore]) -> str:
    """What packing came to, for a report: "packed12: 0.75 of the bytes"; empty without any.

    Matrices that stayed plain are named, and how far what is lost changes them.
    """
    packed = [store for store in stores if isinstance(store, PackedBackingStore)]
    kinds = dict.fromkeys(store.kind for store in packed)
    return "; ".join(_describe([x for x in packed if x.kind == kind]) for kind in kinds)


def _describe(packed: Sequence[PackedBackingStore]) -> str:
    """The same of stores of one kind."""
    plain_nbytes = sum(store.num_experts * store.layout.row_nbytes for store in packed)
    share = sum(store.host_nbytes for store in packed) / plain_nbytes
    stayed = Counter(
        spec.name
        for store in packed
        for spec, packing in zip(store.layout.specs, store.form.packings, strict=True)
        if packing is None and store.could_pack(spec)
    )
    plain = [f", {name} plain in {count} of {len(packed)} layers" for name, count in stayed.items()]
    lost = packed[0].describe_loss(packed)
    return f"{packed[0].kind}: {share:.2f} of the bytes{lost}" + "".join(plain)
