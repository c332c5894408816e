"""The contract of a replacement policy: one decision a layer call.

An event is one layer call with its demand, the distinct experts that it needs. Hits are judged
when the event starts, no demanded expert is a victim of the same event, and scores are updated
before victims are chosen. Ties break by expert id: of equal scores the lower id leaves first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hotexperts.types import Decision, Event

if TYPE_CHECKING:
    from hotexperts.policy.shadow import ShadowHits


class Policy(ABC):
    """One layer's policy. It keeps scores and history; who is resident is told to it.

    A policy that always admits implements `record` and `eviction_key`. One that may let a miss
    pass by (bypass) also overrides `admit`. Shadow caches belong into `record`, which sees every
    event; a kernel twin restates `record`, `eviction_key` and `admit` on tensors.

    Attributes:
        name: in the registry.
        settings: the arguments that shape decisions, named where a class adds some; those of its
            bases count too. A state fits only where they are equal.
        history: likewise the attributes that `reset` makes and a later event needs, "a.b" for one
            of an attribute's own. Not named is what `record` computes anew in each event. See
            `hotexperts.policy.state` for what they may hold.
        times: of the history, what holds numbers of events, -1 for none yet.
        counts: likewise what is counted at most once an event.
        amounts: likewise what is never below 0.

    Args:
        num_experts: experts in the layer; ids are 0 to num_experts - 1.
        capacity: cached slots of the layer, 1 to num_experts.
    """

    name: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ("num_experts", "capacity")
    history: ClassVar[tuple[str, ...]] = ("tick",)
    times: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[tuple[str, ...]] = ()
    amounts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, num_experts: int, capacity: int) -> None:
        assert 1 <= capacity <= num_experts, (capacity, num_experts)
        self.num_experts = num_experts
        self.capacity = capacity
        self.reset()

    def decide(
        self,
        demand: Sequence[int],
        counts: Sequence[int],
        resident: Collection[int],
        free: int,
        *,
        evict: bool = True,
        max_bypassed: int | None = None,
    ) -> Decision:
        """Record one event and choose who enters and who leaves.

        Changes this policy's state; the caller then carries the decision out.

        Args:
            demand: distinct expert ids, ascending.
            counts: tokens routed to each of them, same order, at least 1.
            resident: experts that hold a slot now.
            free: slots that hold nothing.
            evict: False admits into free slots only (prefill).
            max_bypassed: at most so many misses may pass by of the policy's own will; those for
                which there is no victim left pass by in any case. None: no limit.

        Returns:
            Admitted and bypassed partition the misses; `len(victims)` is `len(admitted)` less the
            free slots used; no victim is in the demand.
        """
        self.record(Event(demand, counts, resident, evict))
        demanded = frozenset(demand)
        misses = [expert for expert in demand if expert not in resident]
        candidates: list[int] = []
        if evict and len(misses) > free:
            candidates = sorted([e for e in resident if e not in demanded])
            candidates.sort(key=self.eviction_key)  # stable: ties stay in ascending id
        limit = len(misses) if max_bypassed is None else max_bypassed
        admitted = sorted(self.admit(misses, candidates, free, len(demand), limit))
        victims = candidates[: max(0, len(admitted) - free)]
        self.moved(admitted, victims)
        entered = frozenset(admitted)
        return Decision(
            tuple(admitted), tuple(victims), tuple(e for e in misses if e not in entered)
        )

    def reset(self) -> None:
        """Forget everything, as if just constructed."""
        self.tick = 0

    def state(self) -> dict[str, Any]:
        """All that later decisions depend on, in lists, numbers and strings, as JSON has them.

        Who is resident is not in it: that is the ledger's. Changes nothing.

        Raises:
            ConfigError: the class does not name its history.
        """
        from hotexperts.policy.state import save_state  # needs NumPy, which deciding does not

        return save_state(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the policy whose `state` this is; all that this one knew is forgotten.

        Raises:
            ConfigError: a state of another policy, number of experts, capacity or setting, one
                that is incomplete or of the wrong form, or a class that does not name its
                history. Then nothing has changed.
        """
        from hotexperts.policy.state import load_state

        load_state(self, state)

    def check_history(self) -> None:  # noqa: B027
        """Whether what was restored can be, as far as `times` and the like do not say it.

        Raises:
            ValueError: it cannot.
        """

    def shadow_hits(self) -> ShadowHits | None:
        """What its shadow caches would have hit since the reset; None if it has none."""
        return None

    @abstractmethod
    def record(self, event: Event) -> None:
        """Update scores with one event; who is resident is its state before it."""

    @abstractmethod
    def eviction_key(self, expert: int) -> Any:
        """A resident's score: the smallest leaves first. Ties are broken by the caller."""

    def admit(
        self,
        misses: Sequence[int],
        candidates: Sequence[int],
        free: int,
        num_demanded: int,
        max_bypassed: int,
    ) -> Sequence[int]:
        """The misses that enter: here as many as find a place, in ascending id.

        Args:
            misses: ascending.
            candidates: residents that may leave, in eviction order; empty where none may or
                where the free slots suffice.
            free: free slots.
            num_demanded: size of the event's demand.
            max_bypassed: see `decide`.
        """
        return misses[: free + len(candidates)]

    def moved(self, admitted: Sequence[int], victims: Sequence[int]) -> None:  # noqa: B027
        """Told what `decide` returns; for policies whose order depends on entry."""
