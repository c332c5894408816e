"""One layer's slots and the kernel that decides who is in them, all at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotexperts.cache.device_mode import check_device_mode
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.store import CPUBackingStore
from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.kernels.gather import GatherLayout
from hotexperts.kernels.gather.ahead import AheadRows
from hotexperts.kernels.plan import PlanLayout
from hotexperts.kernels.plan.launch import PlanGather
from hotexperts.residency import Residency


def check_slots(
    store: CPUBackingStore | PackedBackingStore, capacity: int, policy: str, device: torch.device
) -> None:
    """Before memory is taken.

    Raises:
        ConfigError: as for `DeviceWeightProvider`, or a store that is not page-locked.
    """
    check_device_mode(store.layout, policy, device)
    if not 1 <= capacity <= store.num_experts:
        raise ConfigError(
            f"{capacity} slots for {store.num_experts} experts: give 1 to {store.num_experts}"
        )
    if device.type == "cuda" and not store.is_pinned:
        raise ConfigError("the store is not page-locked: make it with pin=True")


class DeviceSlots:
    """What a layer's kernels work on. It is checked by `check_slots` beforehand.

    Args:
        store: all experts.
        capacity: slots, 1 to E.
        policy: one that has a kernel.
        device: where the slots are.
        num_programs: programs that copy.
        ahead: rows that prefetches fill; None without.
        layer: its number, among those that share the rows ahead and the banks.

    Attributes:
        buffer: the memory that the slots are in, int32.
        tensors: named tuple of `[capacity, *shape]`, the slots.
        rows: int32 `[E, row_words]`, all experts in the store.
        plan: where who is in which slot lies in the kernel's state.
        kernel: decides and copies.
        slot_of: int32 `[E]`, on the device; -1 is none.
        passed: int32 `[E]`, likewise: places among those that pass by.
    """

    def __init__(
        self,
        store: CPUBackingStore | PackedBackingStore,
        capacity: int,
        policy: str,
        device: torch.device,
        num_programs: int,
        *,
        ahead: AheadRows | None,
        layer: int,
    ) -> None:
        self.store = store
        self.capacity = capacity
        self.num_programs = num_programs
        buffer, self.tensors = store.layout.allocate(capacity, device)
        self.buffer = buffer.view(torch.int32)
        self.rows = store.rows.view(torch.int32)
        self.plan = PlanLayout(store.num_experts, capacity, policy)
        self.kernel = PlanGather(
            self.plan,
            self.gather(capacity),
            self.rows,
            self.buffer,
            num_programs=num_programs,
            ahead=ahead,
            layer=layer,
        )
        self.slot_of = self.plan.view(self.kernel.state, "slot_of")
        self.passed = self.plan.view(self.kernel.state, "passed")

    def gather(self, num_rows: int) -> GatherLayout:
        """How rows lie in the store, and in a buffer of so many."""
        form, sizes = self.store.form, tuple(spec.nbytes for spec in self.store.layout.specs)
        return GatherLayout.of(form.offsets, sizes, form.row_nbytes, num_rows, form.packings)

    @property
    def words(self) -> torch.Tensor:
        """Int32, on the device: who is in which slot and what the policy knows."""
        return self.kernel.state[: self.plan.scratch]

    def clear(self) -> None:
        """Nobody is there, and the policy knows nothing, in stream order."""
        self.plan.clear(self.kernel.state)

    def restored(self, words: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """The kernel's state that begins with these words, and the slots of the experts in it.

        Raises:
            CheckpointError: they are no such state, or not of so many experts and slots.
        """
        state = self.plan.restored(words)
        ledger = Residency(self.store.num_experts, self.capacity)
        ledger.restore(self.plan.view(state, "slot_of").tolist())
        if ledger.expert_of != self.plan.view(state, "expert_of").tolist():
            raise CheckpointError("the slots of experts and the experts of slots disagree")
        return state, ledger.slot_of
