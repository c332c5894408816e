"""Slots: tensors at fixed addresses, one row a slot, and the ledger of who is in them."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.errors import ConfigError
from hotexperts.formats import ExpertLayout
from hotexperts.residency import Residency


class GPUSlotManager:
    """One layer's slots. Addresses never change after construction.

    Args:
        layout: what a row holds.
        num_experts: experts in the layer.
        capacity: cached slots, 1 to num_experts.
        device: where the slots live; a CPU stands in for a GPU.
        num_staging: further rows for bypassed experts.

    Attributes:
        tensors: named tuple of `[capacity + num_staging, *shape]`, the layout's names and dtypes.
        buffer: uint8, the memory that they are in.
        residency: expert to slot and back.

    Raises:
        ConfigError: the capacity is below 1 or above num_experts.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        num_experts: int,
        capacity: int,
        device: torch.device,
        num_staging: int = 0,
    ) -> None:
        if not 1 <= capacity <= num_experts:
            raise ConfigError(
                f"{capacity} slots for {num_experts} experts: give 1 to {num_experts}"
            )
        self.layout = layout
        self.num_experts = num_experts
        self.capacity = capacity
        self.num_staging = num_staging
        self.device = device
        self.buffer, tensors = layout.allocate(capacity + num_staging, device)
        self.tensors: Any = tensors
        self.residency = Residency(num_experts, capacity, num_staging)

    @property
    def slot_of(self) -> list[int]:
        """Slot of each expert, -1 for none."""
        return self.residency.slot_of

    @property
    def expert_of(self) -> list[int]:
        """Expert in each slot, -1 for none."""
        return self.residency.expert_of

    @property
    def nbytes(self) -> int:
        """Device bytes of the slots."""
        return self.buffer.nbytes
