"""Providers: what an engine talks to for the weights of one layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from hotexperts.cache.lookahead import Lookahead

SLOTS = -1


@dataclass(frozen=True, slots=True)
class ExpertWeightResult:
    """Weights for one kernel call.

    Attributes:
        tensors: named tuple of `[rows, *shape]`; a row is one expert.
        topk_ids: the ids to pass to the kernel, shape and dtype as given: rows of `tensors`, -1
            where this call does not serve the pair.
        expert_map: int32 `[E]` on the device from expert to row, -1 where this call does not serve
            it: for kernels that map ids by themselves, which then take them as they were given.
            None where the host manages the cache.
        part: None where the call serves all pairs. Else it serves only those whose id here is not
            -1, from the slots (`SLOTS`) or from this part of what passes by, counted from 0.
        pairs: of a partial call, int64, ascending positions in the flattened `topk_ids` that it
            serves; None where only the device knows them.
    """

    tensors: Any
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None = None
    part: int | None = None
    pairs: torch.Tensor | None = None


Waves: TypeAlias = Generator[ExpertWeightResult, None, None]


class ExpertWeightProvider(ABC):
    """Gives one layer's kernel the weights that its routed tokens need.

    Attributes:
        is_capturable: nothing in a call waits for the device, so a CUDA graph may contain it.
        lookahead: it wants to know each call's input, to fetch for the next layer; None: nobody
            does.
    """

    is_capturable: bool = False
    lookahead: Lookahead | None = None

    @abstractmethod
    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """Weights for all of `topk_ids` in one kernel call.

        Args:
            topk_ids: expert ids of any shape, int32 or int64; -1 is ignored.

        Raises:
            ExpertCacheOverflow: more distinct experts than slots.
        """

    @abstractmethod
    def waves(self, topk_ids: torch.Tensor, *, prefill: bool = False) -> Waves:
        """The same in as many kernel calls as it takes; each pair is served exactly once.

        A wave's tensors are valid until the next wave is asked for. Close what you do not run to
        its end: the provider stays busy until then.

        Args:
            topk_ids: as for `prepare`.
            prefill: admit into free slots only, so that decode's working set stays.
        """


class FullGPUProvider(ExpertWeightProvider):
    """Every expert resident: ids and weights pass through untouched.

    Args:
        tensors: named tuple of `[E, *shape]`.
    """

    is_capturable = True

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """The ids as given and all experts."""
        return ExpertWeightResult(self.tensors, topk_ids)

    def waves(self, topk_ids: torch.Tensor, *, prefill: bool = False) -> Waves:
        """One wave."""
        yield self.prepare(topk_ids)
