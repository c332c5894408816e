"""The ledger: which expert is in which slot. Decisions are applied here, bytes follow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hotexperts.errors import CheckpointError
from hotexperts.types import Decision, Placement

NOWHERE = -1


class Residency:
    """Expert to slot and back for one layer.

    Slots 0 to capacity - 1 are cached; the `num_staging` slots after them hold bypassed experts
    for one call only.

    Args:
        num_experts: experts in the layer.
        capacity: cached slots.
        num_staging: staging slots.
    """

    def __init__(self, num_experts: int, capacity: int, num_staging: int = 0) -> None:
        self.num_experts = num_experts
        self.capacity = capacity
        self.num_staging = num_staging
        self.reset()

    def reset(self) -> None:
        """Empty every slot."""
        self.slot_of = [NOWHERE] * self.num_experts
        self.expert_of = [NOWHERE] * (self.capacity + self.num_staging)
        self._residents: dict[int, None] = {}

    def restore(self, slot_of: Sequence[int]) -> None:
        """Put every expert where it was.

        Args:
            slot_of: cached slot of each expert, -1 for none.

        Raises:
            CheckpointError: a slot that is none, or two experts in one; every slot is empty then.
        """
        self.reset()
        if len(slot_of) != self.num_experts:
            raise CheckpointError(f"slots of {len(slot_of)} experts, not of {self.num_experts}")
        for expert, slot in enumerate(slot_of):
            if slot == NOWHERE:
                continue
            is_slot = type(slot) is int and 0 <= slot < self.capacity  # true is no slot 1
            if not is_slot or self.expert_of[slot] != NOWHERE:
                self.reset()
                raise CheckpointError(
                    f"expert {expert} in slot {slot!r:.40} of {self.capacity}, "
                    "which is taken or none"
                )
            self._residents[expert] = None
            self._put(expert, slot)

    @property
    def residents(self) -> Collection[int]:
        """Experts in cached slots; a live view."""
        return self._residents.keys()

    @property
    def num_free(self) -> int:
        """Cached slots that hold nothing."""
        return self.capacity - len(self._residents)

    def apply(self, decision: Decision) -> list[Placement]:
        """Carry a decision out: free slots first (lowest first), then the victims' in order.

        Returns:
            Where each admitted expert is to be copied to, ascending by expert.
        """
        num_free_used = len(decision.admitted) - len(decision.victims)
        slots = self._free_slots()[:num_free_used] if num_free_used else []
        slots += [self._remove(victim) for victim in decision.victims]
        placements = [Placement(e, s) for e, s in zip(decision.admitted, slots, strict=True)]
        for expert, slot in placements:
            self._residents[expert] = None
            self._put(expert, slot)
        return placements

    def stage(self, experts: Sequence[int]) -> list[Placement]:
        """Give bypassed experts staging slots, replacing whatever was staged before."""
        assert len(experts) <= self.num_staging, (len(experts), self.num_staging)
        self.unstage()
        placements = [Placement(e, self.capacity + i) for i, e in enumerate(experts)]
        for expert, slot in placements:
            self._put(expert, slot)
        return placements

    def unstage(self) -> None:
        """Empty the staging slots."""
        for slot in range(self.capacity, self.capacity + self.num_staging):
            if self.expert_of[slot] != NOWHERE:
                self.slot_of[self.expert_of[slot]] = NOWHERE
                self.expert_of[slot] = NOWHERE

    def discard(self, experts: Iterable[int]) -> None:
        """Empty the slots of experts whose bytes did not arrive."""
        for expert in experts:
            if self.slot_of[expert] != NOWHERE:
                self._residents.pop(expert, None)
                self._clear(expert)

    def recover(self, experts: Iterable[int]) -> None:
        """After a call that broke off: `discard` these, or everything if the maps disagree."""
        try:
            self.discard(experts)
            self.check()
        except (AssertionError, KeyError):
            self.reset()

    def check(self) -> None:
        """Prove that both maps agree and that counts add up.

        Raises:
            AssertionError: they do not; the message names the first offender.
        """
        for expert, slot in enumerate(self.slot_of):
            assert slot == NOWHERE or self.expert_of[slot] == expert, (expert, slot)
            cached = NOWHERE < slot < self.capacity
            assert cached == (expert in self._residents), (expert, slot)
        occupied = sum(expert != NOWHERE for expert in self.expert_of)
        assert occupied == sum(slot != NOWHERE for slot in self.slot_of), occupied
        assert 0 <= self.num_free <= self.capacity, self.num_free

    def _free_slots(self) -> list[int]:
        return [s for s in range(self.capacity) if self.expert_of[s] == NOWHERE]

    def _put(self, expert: int, slot: int) -> None:
        assert self.slot_of[expert] == NOWHERE, (expert, slot)
        assert self.expert_of[slot] == NOWHERE, (expert, slot)
        self.slot_of[expert] = slot
        self.expert_of[slot] = expert

    def _remove(self, expert: int) -> int:
        del self._residents[expert]
        return self._clear(expert)

    def _clear(self, expert: int) -> int:
        slot = self.slot_of[expert]
        self.slot_of[expert] = NOWHERE
        self.expert_of[slot] = NOWHERE
        return slot
