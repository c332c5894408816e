"""The stores of a model's layers: filled from the checkpoint's files, or from loaded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hotexperts.cache import CPUBackingStore, ExpertStore
from hotexperts.cache.device_mode import choose_mode, option_for_kernels
from hotexperts.cache.file_store import PinnedBounce
from hotexperts.cache.held import refusal, reserve_bounce, settle
from hotexperts.cache.host_memory import PageLockError
from hotexperts.cache.packed_store import PackedBackingStore, packs
from hotexperts.cache.parallel_read import ParallelReader
from hotexperts.cache.quantised import QuantisedStore
from hotexperts.config import CacheConfig
from hotexperts.errors import HostMemoryError
from hotexperts.integrations.transformers.checkpoint import ExpertCheckpoint
from hotexperts.integrations.transformers.coded import CodedExperts
from hotexperts.integrations.transformers.filling import Filling
from hotexperts.integrations.transformers.modules import ExpertsModule
from hotexperts.integrations.transformers.tiers import Tier, disk_stores

if TYPE_CHECKING:
    from hotexperts.integrations.transformers.load import LoadOptions


class Stores(NamedTuple):
    """What holds a model's experts.

    Attributes:
        of_layers: one store a layer.
        held: how the host's memory is held, for a report; empty where no GPU reads it.
        refusal: why page-locking was refused, where it was.
    """

    of_layers: list[ExpertStore]
    held: str
    refusal: str | None


def make_stores(
    found: Sequence[ExpertsModule],
    coded: Sequence[CodedExperts | None],
    checkpoint: ExpertCheckpoint,
    options: LoadOptions,
    device: torch.device,
    capacity: int,
    tier: Tier,
) -> Stores:
    """One store a layer, in memory, on disk or in the file, as the options say.

    Raises:
        HostMemoryError: page-locking is refused, and the options leave no other way.
        CheckpointError: a file cannot be read, or is not what the model needs.
    """
    pin = device.type == "cuda"
    if tier.store == "disk":
        return Stores(_on_disk(tier, options.cache, device), "page-locked" if pin else "", None)
    if tier.store == "file":
        bounce = reserve_bounce(_largest_row(found)) if pin else None
        held = "copied directly, as page-locking was refused" if pin and bounce is None else ""
        return Stores([checkpoint.store(layer, bounce=bounce) for layer in found], held, None)
    with on(device), ParallelReader() as reader:
        maker = StoreMaker.for_model(found, options.cache, device, capacity)
        total = sum(layer.num_experts * layer.layout.nbytes for layer in found)
        filling = Filling(checkpoint, reader, options.progress, total)
        each = zip(found, coded, strict=True)
        stores = [maker.from_files(layer, codes, filling) for layer, codes in each]
        filling.finish()
        return maker.settled(stores)


@dataclass
class StoreMaker:
    """Makes one store after another, in the best memory that is to be had.

    Attributes:
        cache: the user's choices.
        device: where slots go.
        is_packed: whether rows are packed to 12 bits; no more after a refusal, as it is kernels
            that unpack.
        bounce: rows to copy through, kept until it is known that nobody needs them.
    """

    cache: CacheConfig
    device: torch.device
    is_packed: bool
    bounce: PinnedBounce | None = None
    _staged: CPUBackingStore | None = field(default=None, init=False)

    @classmethod
    def for_model(
        cls,
        found: Sequence[ExpertsModule],
        cache: CacheConfig,
        device: torch.device,
        capacity: int,
    ) -> StoreMaker:
        """Decides about packing, and reserves the bounce rows."""
        mode = choose_mode(cache, [layer.layout for layer in found], device)
        is_full = capacity >= max(layer.num_experts for layer in found)
        is_plain = cache.expert_dtype == "none"
        is_packed = is_plain and packs(cache, mode, device, is_full=is_full)
        maker = cls(cache, device, is_packed)
        if maker._is_gpu:
            maker.bounce = reserve_bounce(_largest_row(found))
        return maker

    def from_files(
        self, layer: ExpertsModule, codes: CodedExperts | None, filling: Filling
    ) -> ExpertStore:
        """A layer's store; where its rows are plain, they may still be on their way.

        Args:
            layer: whose experts.
            codes: them as the checkpoint quantised them, where rows keep that.
            filling: reads them.
        """
        if codes is not None:
            with self._kept() as how:
                tell = filling.after_each(codes)
                return QuantisedStore.of_codes(codes, self.device, after_each=tell, **how)
        is_quantised = self.cache.expert_dtype != "none"
        if not (self.is_packed or is_quantised):
            store = self._plain(layer)
            filling.fill(layer, store)
            return store
        staged = self._stage(layer)
        filling.fill(layer, staged)
        filling.finish()
        if is_quantised:
            return self._quantised(staged)
        try:
            return PackedBackingStore.from_store(staged, self.device, pin=self._is_gpu)
        except PageLockError as error:
            self._step_back(error)
            self._staged = None  # from now on it is this layer's own
            return staged

    def from_tensors(self, tensors: Mapping[str, torch.Tensor]) -> ExpertStore:
        """A copy of stacked tensors `[E, *shape]`."""
        if self.cache.expert_dtype != "none":
            return self._quantised(tensors)
        pin, steps_back = self._is_gpu, self._may_step_back
        try:
            if self.is_packed:
                return PackedBackingStore.from_tensors(tensors, self.device, pin=pin)
            return CPUBackingStore.from_tensors(tensors, pin=pin, steps_back=steps_back)
        except PageLockError as error:
            self._step_back(error)
            return self.from_tensors(tensors)

    def settled(self, stores: list[ExpertStore]) -> Stores:
        """The stores, all filled, with the fastest way out of them."""
        held = settle(stores, self.bounce, self.device)
        return Stores(stores, held, refusal(stores))

    @property
    def _may_step_back(self) -> bool:
        return option_for_kernels(self.cache) is None

    @property
    def _is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _plain(self, layer: ExpertsModule) -> CPUBackingStore:
        with self._kept() as how:
            return CPUBackingStore(layer.layout, layer.num_experts, **how)

    def _quantised(self, source: ExpertStore | Mapping[str, torch.Tensor]) -> ExpertStore:
        """Codes that PyTorch makes plain where kernels cannot: they stay so after a refusal."""
        with self._kept() as how:
            return QuantisedStore.quantise(source, self.device, self.cache.expert_dtype, **how)

    @contextmanager
    def _kept(self) -> Iterator[dict[str, bool]]:
        """How rows are held that need no kernel; who asks for kernels is told of a refusal."""
        try:
            yield {"pin": self._is_gpu, "steps_back": self._may_step_back}
        except PageLockError as error:
            raise self._refused(error) from error

    def _stage(self, layer: ExpertsModule) -> CPUBackingStore:
        """One layer's plain rows on their way to the device, used again by the next alike."""
        layout, num_experts, staged = layer.layout, layer.num_experts, self._staged
        if staged is None or (staged.layout, staged.num_experts) != (layout, num_experts):
            staged = self._staged = None  # before the next one is made: there is memory for one
            self._staged = CPUBackingStore(layout, num_experts, pin=self._is_gpu, steps_back=True)
        assert self._staged is not None
        return self._staged

    def _step_back(self, error: PageLockError) -> None:
        """No kernel will read the rows: this layer's, and the following, are plain."""
        if not self.is_packed or not self._may_step_back:
            raise self._refused(error) from error
        self.is_packed = False

    def _refused(self, error: PageLockError) -> HostMemoryError:
        option = option_for_kernels(self.cache)
        return error.needed_by(str(option), "leave that option out")


def _on_disk(tier: Tier, cache: CacheConfig, device: torch.device) -> list[ExpertStore]:
    with on(device):
        try:
            return [*disk_stores(tier, cache, device)]
        except PageLockError as error:
            raise error.needed_by("expert_store 'disk'", "use expert_store 'file'") from error


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a GPU is the current one, near which memory is placed."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _largest_row(found: Sequence[ExpertsModule]) -> int:
    return max(layer.layout.row_nbytes for layer in found)
