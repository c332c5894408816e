"""The experts function that Transformers calls in every MoE layer, and its cached state.

The matrix products are Transformers' own: its implementations run on a shallow copy of the experts
module whose weight attributes are slot tensors and whose ids are slots.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import closing
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from hotexperts.cache import ExpertWeightProvider, ExpertWeightResult
from hotexperts.errors import ConfigError, UnsupportedOperationError
from hotexperts.integrations.transformers import compat

NAME = "hotexperts"
PREFILL_MIN_TOKENS = 64  # calls of more tokens must not push decode's experts out
BATCHED_MAX_PAIRS = 64  # batched_mm copies the weights of every pair: only for few

Algorithm: TypeAlias = Literal["auto", "eager", "batched_mm", "grouped_mm"]
ALGORITHMS: tuple[Algorithm, ...] = ("auto", "eager", "batched_mm", "grouped_mm")

_keys = itertools.count()
_layers: weakref.WeakValueDictionary[int, CachedExperts] = weakref.WeakValueDictionary()


class CachedExperts:
    """One experts module and the provider of its weights.

    Args:
        module: the experts module, its parameters taken out.
        provider: gives the weights.
        device: where its slots are.
        algorithm: which of Transformers' implementations multiplies; "auto" takes `batched_mm`
            for few pairs on CUDA, as Transformers does when it decodes, and else `grouped_mm`.

    Attributes:
        guess: from the layer's input to scores of the next layer's experts; None: at most the
            provider's lift table guesses.

    Raises:
        ConfigError: an unknown algorithm.
    """

    def __init__(
        self,
        module: nn.Module,
        provider: ExpertWeightProvider,
        device: torch.device,
        algorithm: Algorithm = "auto",
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(
                f"experts_algorithm is {algorithm!r}: use one of {', '.join(ALGORITHMS)}"
            )
        self.provider = provider
        self.device = device
        self.algorithm = algorithm
        self.guess: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.key = next(_keys)
        self._module = weakref.ref(module)
        self._proxies: dict[tuple[int, bool], nn.Module] = {}
        _layers[self.key] = self
        module._hotexperts = self

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph may contain a call."""
        return self.provider.is_capturable and self.algorithm != "eager"

    def run(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden: `[T, H]`.
            index: `[T, K]` expert ids, all of them valid: without expert parallelism, which is
                refused, a router gives no others.
            weights: `[T, K]`.

        Returns:
            `[T, H]` in hidden's dtype.
        """
        algorithm = self._choose(index)
        waves = self.provider.waves(index, prefill=len(index) > PREFILL_MIN_TOKENS)
        with closing(waves):
            first = next(waves)
            lookahead = self.provider.lookahead
            if lookahead is not None:
                is_prefill = len(index) > PREFILL_MIN_TOKENS
                lookahead.look(index, hidden, self.guess, prefill=is_prefill)
            if first.part is None and algorithm != "eager":
                multiply = _multiply(algorithm, self._proxy(first))
                return multiply(self._proxy(first), hidden, first.topk_ids, weights)
            if algorithm == "eager":
                return self._sum_by_expert(itertools.chain([first], waves), hidden, index, weights)
            rows = hidden.new_zeros(index.numel(), hidden.shape[-1])
            for wave in itertools.chain([first], waves):
                if wave.pairs is None:
                    self._fill_masked(algorithm, wave, hidden, rows)
                elif wave.pairs.numel() > 0:
                    self._fill_pairs(algorithm, wave, wave.pairs, hidden, rows)
        weighted = rows * weights.reshape(-1, 1)
        return weighted.view(*index.shape, -1).sum(dim=1).to(hidden.dtype)

    def _fill_pairs(
        self,
        algorithm: str,
        wave: ExpertWeightResult,
        pairs: torch.Tensor,
        hidden: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """Write the unweighted output of these pairs into rows `[T * K, H]`."""
        proxy = self._proxy(wave)
        tokens = hidden[pairs // wave.topk_ids.shape[-1]]
        slots = wave.topk_ids.reshape(-1, 1)[pairs]
        ones = tokens.new_ones(len(pairs), 1)
        rows[pairs] = _multiply(algorithm, proxy)(proxy, tokens, slots, ones)

    def _fill_masked(
        self, algorithm: str, wave: ExpertWeightResult, hidden: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """The same for the wave's pairs, which only the device knows: others pass as a sentinel."""
        slots = wave.topk_ids.reshape(-1, 1)
        is_served = slots >= 0
        proxy = self._proxy(wave)
        ids = torch.where(is_served, slots, proxy.num_experts)
        tokens = hidden.repeat_interleave(wave.topk_ids.shape[-1], dim=0)
        ones = tokens.new_ones(len(rows), 1)
        found = _multiply(algorithm, proxy)(proxy, tokens, ids, ones)
        torch.where(is_served, found, rows, out=rows)

    def _sum_by_expert(
        self,
        waves: Any,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Transformers' eager order: experts ascending, each added in the class's dtype."""
        total = torch.zeros_like(hidden, dtype=compat.eager_sum_dtype(self._module(), weights))
        ids, top_k = index.flatten().cpu(), index.shape[-1]
        parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for wave in waves:
            proxy = self._proxy(wave)
            slots = wave.topk_ids.reshape(-1, 1)
            served = (slots.flatten() >= 0).nonzero().flatten().cpu()
            for expert in ids[served].unique().tolist():
                pairs = served[ids[served] == expert]
                pairs = pairs[(pairs % top_k).argsort(stable=True)].to(hidden.device)
                tokens, pair_weights = pairs // top_k, weights.reshape(-1, 1)[pairs]
                ones = hidden.new_ones(len(pairs), 1)
                out = _multiply("eager", proxy)(proxy, hidden[tokens], slots[pairs], ones)
                parts[expert] = tokens, (out * pair_weights).to(total.dtype)
        for expert in sorted(parts):
            total.index_add_(0, *parts[expert])
        return total.to(hidden.dtype)

    def _choose(self, index: torch.Tensor) -> str:
        if self.algorithm != "auto":
            return self.algorithm
        return (
            "batched_mm" if index.is_cuda and index.numel() <= BATCHED_MAX_PAIRS else "grouped_mm"
        )

    def _proxy(self, wave: ExpertWeightResult) -> nn.Module:
        """The module as it would be with the wave's rows for experts; made once a tensor set."""
        is_partial = wave.part is not None
        key = wave.tensors[0].data_ptr(), is_partial
        proxy = self._proxies.get(key)
        if proxy is None:
            module = self._module()
            assert module is not None, "the module owns this object"
            proxy = object.__new__(type(module))  # copy() is refused, see guard.py
            proxy.__dict__.update(module.__dict__)
            del proxy.__dict__["_hotexperts"]
            proxy.__dict__.update(wave.tensors._asdict())
            proxy.__dict__["num_experts"] = wave.tensors[0].shape[0]
            # Ids beyond the rows are then skipped (see compat.SENTINEL_FLAG).
            proxy.__dict__[compat.SENTINEL_FLAG] = is_partial
            self._proxies[key] = proxy
        return proxy


def set_algorithm(model: nn.Module, algorithm: Algorithm) -> None:
    """Let a cached model multiply in another way from now on; its slots stay as they are.

    Args:
        model: with an `expert_cache`.
        algorithm: as for `CachedExperts`.
    """
    for module in model.modules():
        if isinstance(layer := getattr(module, "_hotexperts", None), CachedExperts):
            layer.algorithm = algorithm


def _multiply(algorithm: str, module: nn.Module) -> Any:
    if algorithm == "eager":
        return compat.original_forward(module)
    found = compat.names()
    return found.batched_mm if algorithm == "batched_mm" else found.grouped_mm


def _experts(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, layer: int
) -> torch.Tensor:
    cached = _layers[layer]
    lookahead = cached.provider.lookahead
    if lookahead is not None and lookahead.keeps_ids:
        index = index.clone()  # compiled code writes something else there before they are counted
    return cached.run(hidden, index, weights)


def _like_hidden(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, layer: int
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)  # contiguous, whatever hidden is


# Opaque to torch.compile. What the host manages must stay outside of the CUDA graphs that it makes.
_capturable_op = torch.library.custom_op(
    "hotexperts::capturable_experts", _experts, mutates_args=()
)
_eager_op = torch.library.custom_op(
    "hotexperts::experts", _experts, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
for _op in (_capturable_op, _eager_op):
    _op.register_fake(_like_hidden)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What Transformers calls under the name "hotexperts"; arguments as for `CachedExperts.run`.

    Raises:
        UnsupportedOperationError: no cache is attached, or gradients are asked for.
    """
    state = getattr(self, "_hotexperts", None)
    if state is None:
        raise UnsupportedOperationError(
            f"{type(self).__name__} has no expert cache: load the model with "
            "hotexperts.transformers.load(), or attach() one"
        )
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        raise UnsupportedOperationError(
            "gradients through cached experts are not supported: run under torch.no_grad(), and "
            "train or fine-tune (PEFT) without an expert cache"
        )
    if not torch.compiler.is_compiling():  # an operator's way takes the host 30 us more
        return state.run(hidden_states, top_k_index, top_k_weights)
    op = _capturable_op if state.is_capturable else _eager_op
    return op(hidden_states, top_k_index, top_k_weights, state.key)


def register() -> None:
    """Make the name known to Transformers; harmless when repeated."""
    functions = compat.names().experts_functions
    if NAME not in functions:
        functions.register(NAME, experts_forward)
