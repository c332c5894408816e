"""What `verify` does once it needs torch: the same tokens, resident and cached, value by value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotexperts.bench.difference import (
    Step,
    drawn_ids,
    first_difference,
    likeliest,
    max_difference,
    number_or_none,
    record,
)
from hotexperts.bench.sources import PROBE, free_memory, mode_beyond, resident_model
from hotexperts.cache.device_mode import ChosenMode
from hotexperts.cli.console import loading, quiet_libraries
from hotexperts.cli.options import model_label
from hotexperts.cli.report import Data, stats_data
from hotexperts.cli.text import load_tokenizer
from hotexperts.config import AUTO
from hotexperts.errors import ConfigError
from hotexperts.integrations.transformers.positions import max_positions
from hotexperts.sizing import LayerShape, fixed_capacity
from hotexperts.stats import CacheStats
from hotexperts.transformers import load

_NUM_DRAWN_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to compare.

    Attributes:
        path: of the checkpoint.
        sizes: of the caches, as `load` takes them; none compares 1, a quarter, half and all.
        algorithm: Transformers' implementation that multiplies on both sides.
        num_tokens: greedy tokens after the prompt.
        prompt: text; None draws ids at random, and no tokenizer is needed.
        tolerance: on logits; 0 compares every bit of hidden states and logits.
        trust_remote_code: run Python code of the checkpoint.
        load_options: more for `load`: device, dtype, policy, expert_store, cache_mode, ...
    """

    path: str
    sizes: Sequence[str]
    algorithm: str
    num_tokens: int
    prompt: str | None
    tolerance: float
    trust_remote_code: bool
    load_options: dict[str, Any]


def verify_model(wanted: Comparison) -> Data:
    """Run the model resident, then through each cache, and compare.

    Raises:
        ConfigError: a size above the number of experts or too small a budget, an empty prompt, or
            more tokens than the model has positions.
        HotExpertsError: whatever `load` refuses.
    """
    data, ids = _look(wanted)
    free_memory()
    sizes = wanted.sizes or _default_sizes(data["num_experts"])
    _check_sizes(wanted, sizes, data["num_experts"])
    resident = _resident(wanted, data["device"])
    with quiet_libraries():
        expected = record(resident, ids, [], wanted.num_tokens)
    del resident
    free_memory()
    tokens = likeliest(expected)
    rows = [_compare_at(size, wanted, ids, expected, tokens) for size in sizes]
    return {
        **data,
        "num_prompt_tokens": len(ids),
        "token_ids": tokens,
        "passed": all(row["passed"] for row in rows),
        "capacities": rows,
    }


def _look(wanted: Comparison) -> tuple[Data, list[int]]:
    """What the model is, and the prompt's ids.

    Raises:
        ConfigError: see `mode_beyond`.
    """
    probe = _cached(wanted, "1", **PROBE)
    mode = mode_beyond(probe, wanted.load_options)
    ids = _prompt_ids(wanted, probe)
    _check_length(wanted, len(ids), max_positions(probe.config))
    return _describe(wanted, probe, mode), ids


def _check_length(wanted: Comparison, num_prompt_tokens: int, positions: int | None) -> None:
    if positions is None or num_prompt_tokens + wanted.num_tokens <= positions:
        return
    room = positions - num_prompt_tokens
    raise ConfigError(
        f"{num_prompt_tokens} tokens of prompt and {wanted.num_tokens} generated ones are more "
        f"than the model's {positions} positions: "
        + (f"give --tokens {room} or less" if room > 0 else "give a shorter prompt")
    )


def _describe(wanted: Comparison, model: Any, mode: ChosenMode) -> Data:
    cache = model.expert_cache
    return {
        "model": model_label(wanted.path),
        "model_class": type(model).__name__,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "algorithm": wanted.algorithm,
        "policy": cache.policy,
        "cache_mode": mode.mode,
        "cache_mode_reason": mode.reason,
        "num_experts": min(p.store.num_experts for p in cache.providers),
        "num_layers": len(cache.providers),
        "num_tokens": wanted.num_tokens,
        "tolerance": wanted.tolerance,
    }


def _default_sizes(num_experts: int) -> list[str]:
    return [str(n) for n in sorted({1, -(-num_experts // 4), -(-num_experts // 2), num_experts})]


def _check_sizes(wanted: Comparison, sizes: Sequence[str], num_experts: int) -> None:
    """Refuse before the long part begins; a budget needs the model, its experts left in the file.

    "auto" asks for the memory that is free then, which is not known before.
    """
    for size in sizes:
        if size.isdecimal():
            fixed_capacity(int(size), [LayerShape(num_experts, top_k=1, row_nbytes=0)])
        elif size != AUTO:
            _cached(wanted, size, **PROBE)
            free_memory()


def _prompt_ids(wanted: Comparison, model: Any) -> list[int]:
    if wanted.prompt is None:
        return drawn_ids(model, _NUM_DRAWN_TOKENS)
    tokenizer = load_tokenizer(wanted.path, trust_remote_code=wanted.trust_remote_code)
    ids: list[int] = tokenizer(wanted.prompt)["input_ids"]
    if not ids:
        raise ConfigError("the prompt is empty: give at least one token")
    return ids


def _compare_at(
    size: str,
    wanted: Comparison,
    ids: list[int],
    expected: list[Step],
    tokens: list[int],
) -> Data:
    """One cache size: the resident model's tokens are fed, so that one difference stays one."""
    found, capacity, stats = _record_cached(size, wanted, ids, tokens)
    free_memory()
    worst = max(max_difference(a.logits, b.logits) for a, b in zip(expected, found, strict=True))
    first = first_difference(expected, found, len(ids))
    return {
        "size": size,
        "capacity": capacity,
        "passed": first is None or worst <= wanted.tolerance > 0,
        "max_abs_logits": number_or_none(worst),
        "first_difference": first,
        "num_equal_tokens": sum(
            int(step.logits[-1].argmax()) == token
            for step, token in zip(found, tokens, strict=True)
        ),
        "stats": stats_data(stats),
    }


def _record_cached(
    size: str, wanted: Comparison, ids: list[int], tokens: list[int]
) -> tuple[list[Step], int, CacheStats]:
    model = _cached(wanted, size)
    with quiet_libraries():
        found = record(model, ids, tokens, wanted.num_tokens)
    return found, model.expert_cache.capacity, model.expert_cache.stats


def _cached(wanted: Comparison, size: str, **more: Any) -> Any:
    options = {
        "experts_algorithm": wanted.algorithm,
        "trust_remote_code": wanted.trust_remote_code,
        **wanted.load_options,
        **more,
    }
    with loading(f"loading for {size} slots") as progress:
        return load(wanted.path, expert_cache_size=size, progress=progress, **options)


def _resident(wanted: Comparison, device: str) -> Any:
    """The model as Transformers alone loads it."""
    with loading("loading the resident model"):
        return resident_model(
            wanted.path,
            device=device,
            dtype=wanted.load_options["dtype"],
            trust_remote_code=wanted.trust_remote_code,
            experts_implementation=wanted.algorithm,
        )
