"""Where a layer's cache state lies in its one int32 tensor, so that a launch passes few pointers.

Float fields hold float32 bits: scores are never negative, so their bits order as they do.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hotexperts.errors import CheckpointError

NOWHERE = -1
NUM_SCALARS = 16
_FIELDS: dict[str, dict[str, int]] = {  # policy: field to its initial value
    "lru": {"last_use": -1},
    "lfu": {"last_use": -1, "count": 0},
    "lfru": {"last_use": -1, "count": 0},
    "lcp": {"last_use": -1, "count": 0},
    "ewma": {"score": 0},
    "auto": {"fast": 0, "slow": 0},
    # Seven averages, then who is in each of seven shadow caches and in LRU's, in the states after
    # an even and after an odd number of events: a launch reads one and writes the other.
    "adv": {f"average_{i}": 0 for i in range(7)}
    | {f"held_{parity}_{j}": 0 for parity in range(2) for j in range(8)}
    | {"last_use": -1},
}
DEVICE_POLICIES = tuple(sorted(_FIELDS))
BYPASSING_POLICIES = ("adv", "auto")


def may_bypass(policy: str, num_demanded: int, capacity: int) -> bool:
    """Whether a policy lets a miss pass by of its own will when so many experts are demanded."""
    return policy in BYPASSING_POLICIES and 10 * num_demanded > 6 * capacity


class Scalar(enum.IntEnum):
    """Places of the scalars at the front of the state."""

    CLOCK = 0  # events so far
    ARRIVED = 1  # programs of the running launch that have read the state; 0 between launches
    USES = 2  # lfu: uses since the counters were halved
    WORTH = 3  # adv: from here on, the discounted hits of its seven shadows and of LRU's
    REGRET = 11  # adv: those of LRU less its own, discounted more slowly


class Counter(enum.IntEnum):
    """Places in the int64 counters."""

    CALLS = 0
    HITS = 1
    MISSES = 2
    BYPASSES = 3
    EVICTIONS = 4
    WAVES = 5
    COPIES = 6  # rows, wherever to
    SHADOW_HITS = 7  # adv: from here on, of its seven shadows
    LRU_HITS = 14  # adv: of an LRU cache of as many slots
    AHEAD = 15  # from here on, those of `AheadCounter`


NUM_COUNTERS = Counter.AHEAD + 4


@dataclass(frozen=True)
class PlanLayout:
    """Offsets, in int32 elements, of one layer's state.

    Attributes:
        num_experts: E.
        capacity: cached slots.
        policy: one of `DEVICE_POLICIES`.
        slot_of: `[E]`, slot of each expert, -1 for none.
        expert_of: `[capacity]`, expert in each slot, -1 for none.
        passed: `[E]`, place of an expert among those that the last event bypassed, -1 for others.
        fields: the policy's `[E]` fields by name.
        scratch: working memory of a launch, 8-byte aligned, split in the kernel.
        shadow_scratch: the same of adv's shadows.
        num_words: size of the state.
    """

    num_experts: int
    capacity: int
    policy: str
    slot_of: int = field(init=False, default=NUM_SCALARS)
    expert_of: int = field(init=False)
    passed: int = field(init=False)
    fields: dict[str, int] = field(init=False, compare=False)
    scratch: int = field(init=False)
    shadow_scratch: int = field(init=False)
    num_words: int = field(init=False)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("expert_of", self.slot_of + self.num_experts)
        put("passed", self.expert_of + self.capacity)
        first = self.passed + self.num_experts
        names = _FIELDS[self.policy]
        put("fields", {name: first + i * self.num_experts for i, name in enumerate(names)})
        scratch = first + len(names) * self.num_experts
        put("scratch", scratch + scratch % 2)
        # Three int64 rankings, a map and the targets; then three rankings for each shadow.
        own = 8 * self.num_experts + self.capacity
        shadows = 8 * 6 * self.num_experts if self.policy == "adv" else 0
        put("shadow_scratch", self.scratch + own + own % 2)
        put("num_words", self.shadow_scratch + shadows)

    @property
    def policy_base(self) -> int:
        """Offset of the policy's first field; the others follow at E elements each."""
        return self.passed + self.num_experts

    def fresh(self, device: torch.device) -> torch.Tensor:
        """The state of an empty cache, int32 `[num_words]`."""
        state = torch.zeros(self.num_words, dtype=torch.int32)
        state[self.slot_of : self.policy_base] = NOWHERE
        for name, initial in _FIELDS[self.policy].items():
            state[self.fields[name] : self.fields[name] + self.num_experts] = initial
        return state.to(device)

    def clear(self, state: torch.Tensor) -> None:
        """Make `state` that of an empty cache, in place and in stream order.

        At once: an interrupt in the middle would leave experts in slots that do not hold them.
        """
        state.copy_(self.fresh(state.device))

    def restored(self, words: Sequence[int]) -> torch.Tensor:
        """A state that begins as `words`, another one's up to `scratch`, between two launches.

        Raises:
            CheckpointError: too few or too many, no int32, or a use that is yet to come.
        """
        if len(words) != self.scratch:
            raise CheckpointError(
                f"{len(words)} words of state, not the {self.scratch} of {self.policy!r} here: "
                "another version of hotexperts saved it, or it is cut"
            )
        if not all(isinstance(word, int) and -(2**31) <= word < 2**31 for word in words):
            raise CheckpointError(f"not all of {len(words)} words of state are of 32 bits")
        state = self.fresh(torch.device("cpu"))
        state[: self.scratch] = torch.tensor(words, dtype=torch.int32)
        state[Scalar.ARRIVED] = 0
        self.view(state, "passed").fill_(NOWHERE)
        if "last_use" in self.fields:  # from which kernels count back to an entry of a table
            last_use, now = self.view(state, "last_use"), int(state[Scalar.CLOCK])
            if int(last_use.min()) < NOWHERE or int(last_use.max()) >= max(0, now):
                raise CheckpointError(f"uses before the first of {now} events, or after the last")
        return state

    def view(self, state: torch.Tensor, name: str) -> torch.Tensor:
        """A field of the state: "slot_of", "expert_of", "passed" or one of the policy's."""
        begin = self.fields[name] if name in self.fields else getattr(self, name)
        length = self.capacity if name == "expert_of" else self.num_experts
        return state[begin : begin + length]
