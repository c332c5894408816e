"""What runs in the place of `fused_experts.apply`: the same kernel over slots, once or in waves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from hotexperts.cache import ExpertWeightResult
from hotexperts.cache.lookahead import Lookahead
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.errors import UnsupportedModelError
from hotexperts.integrations.vllm.compat import takes_ids, tuned_for
from hotexperts.integrations.vllm.options import flag


class CachedFusedExperts:
    """One layer's kernel over its cache.

    Args:
        provider: gives the weights.
        experts: vLLM's experts object, whose `apply` is replaced by this one's.
        parameters: the layer's per-expert parameters by name; their data are the slots.
        dialect: how the kernel is told which pairs a wave serves, see `compat.DIALECTS`.
        prefill_tokens: calls of more tokens are prefills.

    Attributes:
        recorded: where each call leaves its ids, int32 `[rows, K]`; None: nowhere.
        guess: from the experts' input to scores of the next layer's; None: at most the provider's
            lift table guesses.
    """

    def __init__(
        self,
        provider: StreamingProvider,
        experts: Any,
        parameters: dict[str, Any],
        dialect: str,
        prefill_tokens: int,
    ) -> None:
        self._multiply = experts.apply
        self._parameters = parameters
        self.use(provider)
        self._dialect = dialect
        self._prefill_tokens = prefill_tokens
        self.recorded: torch.Tensor | None = None
        self.guess: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._rows = KeptRows(experts) if dialect == "map" else None
        experts.apply = self.apply

    def use(self, provider: StreamingProvider) -> None:
        """Read from this provider's slots from now on."""
        self.provider = provider
        self._slots = provider.slot_tensors._asdict()
        self._name_at = {slots.data_ptr(): name for name, slots in self._slots.items()}
        for name, parameter in self._parameters.items():
            parameter.data = self._slots[name]

    def apply(self, **call: Any) -> None:
        """One call of vLLM's, its ids those of experts.

        Args:
            call: the keyword arguments of `FusedMoEExpertsModular.apply`.
        """
        if self.recorded is not None:
            self.recorded[: len(call["topk_ids"])].copy_(call["topk_ids"])
        ids = _local_ids(call["topk_ids"], call["expert_map"])
        waves = self.provider.waves(ids, prefill=ids.shape[0] > self._prefill_tokens)
        with closing(waves):
            first = next(waves)
            if self.provider.lookahead is not None:
                self._look_ahead(self.provider.lookahead, ids, call["hidden_states"])
            if first.part is None:
                self._run(call, first)
            elif self._rows is not None:
                self._sum_of_rows(call, itertools.chain([first], waves), self._rows)
            else:
                self._sum_of_waves(call, itertools.chain([first], waves))

    def _look_ahead(self, lookahead: Lookahead, ids: torch.Tensor, hidden: torch.Tensor) -> None:
        from hotexperts.integrations.vllm.prefetching import (
            may_be_routed,
            spans_layers,
            warn_of_quantised_inputs,
        )

        if spans_layers():
            guess = self.guess if may_be_routed(hidden) else None
            if guess is None and self.guess is not None and lookahead.lift is None:
                warn_of_quantised_inputs()
            is_prefill = ids.shape[0] > self._prefill_tokens
            lookahead.look(ids, hidden, guess, prefill=is_prefill)

    def _sum_of_rows(
        self, call: dict[str, Any], waves: Iterator[ExpertWeightResult], rows: KeptRows
    ) -> None:
        """Exact: every pair's row is kept, and the kernel's own sum runs once over all of them."""
        with rows.keeping():
            for wave in waves:
                rows.is_served = wave.topk_ids >= 0
                self._run(call, wave)
        rows.sum_into(call["output"], call["topk_ids"])

    def _sum_of_waves(self, call: dict[str, Any], waves: Iterator[ExpertWeightResult]) -> None:
        """The output shares its memory with the next wave's workspace, so it holds no sum."""
        total = None
        for wave in waves:
            self._run(call, wave)
            part = call["output"].to(torch.float32, copy=True)
            if call["apply_router_weight_on_input"]:  # then weight 0 does not silence a pair
                part *= wave.topk_ids >= 0  # [T, 1]: one expert a token
            total = part if total is None else total.add_(part)
        assert total is not None, "a call has at least one wave"
        call["output"].copy_(total)

    def _run(self, call: dict[str, Any], wave: ExpertWeightResult) -> None:
        weights = {name: self._rows_for(call[name], wave) for name in ("w1", "w2")}
        with self._reading(wave.tensors), tuned_for(self.provider.store.num_experts):
            self._multiply(**call | weights | self._pairs(call, wave))

    def _rows_for(self, argument: torch.Tensor, wave: ExpertWeightResult) -> torch.Tensor:
        """The wave's rows of a matrix, which is an argument of the kernel and no attribute."""
        name = self._name_at.get(argument.data_ptr())
        if name is None or argument.shape != self._slots[name].shape:
            raise UnsupportedModelError(
                f"vLLM multiplies by a matrix {list(argument.shape)} that is none of "
                f"{', '.join(self._slots)}: run the model without {flag('size')}"
            )
        return getattr(wave.tensors, name)

    def _pairs(self, call: dict[str, Any], wave: ExpertWeightResult) -> dict[str, Any]:
        """The ids of the wave's rows, and what keeps the kernel from serving other pairs."""
        local, global_map = wave.topk_ids, call["expert_map"]
        if self._dialect == "zero":
            is_here = local >= 0
            routing = torch.where(is_here, call["topk_weights"], 0)
            ids = torch.where(is_here, local, 0)  # of slots, which no map of experts is about
            return {"topk_ids": ids, "topk_weights": routing, "expert_map": None}
        if global_map is None and wave.part is None:
            return {"topk_ids": local}
        assert wave.expert_map is not None, "a kernel with a map has a device-managed cache"
        if global_map is None:
            return {"expert_map": wave.expert_map}
        row_of = wave.expert_map[global_map.clamp(min=0).long()]
        return {"expert_map": torch.where(global_map >= 0, row_of, -1)}

    @contextmanager
    def _reading(self, tensors: Any) -> Iterator[None]:
        """Inside, the kernel reads biases and scales of these rows: it holds the parameters."""
        if tensors is self.provider.slot_tensors:
            yield
            return
        for name, parameter in self._parameters.items():
            parameter.data = getattr(tensors, name)
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = self._slots[name]


class KeptRows:
    """Takes an experts object's rows `[T, K, H]` before it sums them, wave by wave.

    Args:
        experts: one with a `moe_sum(rows, output, ...)`, which this replaces.
    """

    def __init__(self, experts: Any) -> None:
        self._sum = experts.moe_sum
        self._is_keeping = False
        self._kept: torch.Tensor | None = None
        self.is_served: Any = None
        experts.moe_sum = self._moe_sum

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, sums are put off."""
        self._is_keeping, self._kept = True, None
        try:
            yield
        finally:
            self._is_keeping = False

    def sum_into(self, output: torch.Tensor, topk_ids: torch.Tensor) -> None:
        """The sum of the rows that were kept, as the kernel would have made it."""
        rows, self._kept = self._kept, None
        assert rows is not None, "a call has at least one wave"
        more = (topk_ids, None) if takes_ids(self._sum) else ()
        self._sum(rows, output, *more)

    def _moe_sum(self, rows: torch.Tensor, output: torch.Tensor, *more: Any) -> None:
        if not self._is_keeping:
            self._sum(rows, output, *more)
            return
        if self._kept is None:
            self._kept = torch.zeros_like(rows)
        shape = self.is_served.shape
        torch.where(self.is_served.unsqueeze(-1), rows.view(*shape, -1), self._kept, out=self._kept)


def _local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Ids of this rank's experts, -1 for those of others."""
    if expert_map is None:
        return topk_ids
    local = expert_map[topk_ids.clamp(min=0).long()].to(topk_ids.dtype)
    return torch.where(topk_ids >= 0, local, -1)
