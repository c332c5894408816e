"""The measurement: resident first, then each cache, which must give the same bits before it counts.

A cache starts cold, with empty slots, and decodes the first group of sequences; then, warm, the
others and the first again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotexperts.bench.decode import Decoder
from hotexperts.bench.difference import Step, drawn_ids, first_difference, likeliest, record
from hotexperts.bench.rows import Found, Row, add_each, cached_row, resident_row
from hotexperts.bench.sources import Source, free_memory, resident_or_refuse
from hotexperts.cache.link import link_gb_s
from hotexperts.integrations.transformers.experts import BATCHED_MAX_PAIRS, set_algorithm
from hotexperts.integrations.transformers.modules import top_k_of

LINK_EXPERTS = 8  # a copy
_WARM_UP_STEPS = 2
_VERIFY_PROMPT_TOKENS, _VERIFY_TOKENS = 32, 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure.

    Attributes:
        sizes: of the caches, as `load` takes them.
        batches: sequences decoded together.
        prompt_tokens: of each sequence.
        steps: of decode after them.
        has_resident: measure the resident model too, compare with it, and give bounds.
    """

    sizes: Sequence[str]
    batches: Sequence[int]
    prompt_tokens: int
    steps: int
    has_resident: bool

    @property
    def max_positions(self) -> int:
        """Of a sequence."""
        return self.prompt_tokens + self.steps + 1

    @property
    def kv_tokens(self) -> int:
        """Of the largest batch together."""
        return max(self.batches) * self.max_positions


class Resident(NamedTuple):
    """What the resident model did.

    Attributes:
        ids: of the prompt that caches must repeat; none where nothing is compared.
        expected: its steps.
        ms: of a prefill and of a step, by batch.
        rows: one a batch.
    """

    ids: list[int]
    expected: list[Step]
    ms: Mapping[int, tuple[float, float]]
    rows: list[Row]


def measure(source: Source, wanted: Wanted, on_done: Callable[[], None]) -> dict[str, Any]:
    """Rows of every cache and batch.

    Args:
        source: of the model.
        wanted: what to measure.
        on_done: called after the resident model and after each cache.

    Returns:
        `rows`, and of the model its class, dtype, layers and experts. A cache that differs from
        the resident model has rows without any speed. `stopped`, true, where Ctrl-C came when a
        cache was done.

    Raises:
        ConfigError: a size that cannot be, or a resident model that does not fit.
    """
    for size in wanted.sizes:
        source.check(size, wanted.kv_tokens)
    free_memory()
    resident = Resident([], [], {}, [])
    if wanted.has_resident:
        resident = _measure_resident(source, wanted)
        on_done()
    facts: dict[str, Any] = {}
    rows = [*resident.rows]

    def of_size(size: str) -> list[Row]:
        found, measured = _measure_cache(source, wanted, size, resident)
        facts.update(found)  # the same for each
        on_done()
        return measured

    stopped = add_each(rows, wanted.sizes, of_size)
    return {**facts, **stopped, "rows": rows}


def _measure_resident(source: Source, wanted: Wanted) -> Resident:
    start = time.perf_counter()
    model = resident_or_refuse(source)
    about = {"capacity": None, "load_seconds": time.perf_counter() - start}
    ids = drawn_ids(model, _VERIFY_PROMPT_TOKENS)
    model.set_experts_implementation("eager")
    expected = record(model, ids, [], _VERIFY_TOKENS)
    rows, ms = [], {}
    for batch in wanted.batches:
        found = _decoded(source, model, wanted, batch)
        row = {**about, "batch": batch, **resident_row(found, batch, wanted.prompt_tokens)}
        ms[batch] = row["warm"]["prefill_ms"], row["warm"]["step_ms"]
        rows.append(row)
    del model
    free_memory()
    return Resident(ids, expected, ms, rows)


def _measure_cache(
    source: Source, wanted: Wanted, size: str, resident: Resident
) -> tuple[dict[str, Any], list[Row]]:
    """What is true of all caches, and the rows of this one."""
    start = time.perf_counter()
    model = source.cached(size, wanted.kv_tokens)
    about = _about(model, size) | {"load_seconds": time.perf_counter() - start}
    facts, said = _facts(model), _verified(model, resident)
    link = link_gb_s(LINK_EXPERTS * facts["expert_nbytes"], model.device)
    rows = []
    for batch in wanted.batches:
        row = {**about, "batch": batch, "link_gb_s": link, **said}
        if said["verified"] is not False:
            found = _decoded(source, model, wanted, batch)
            row |= cached_row(found, batch, wanted.prompt_tokens, resident.ms.get(batch), link)
        rows.append(row)
    del model
    free_memory()
    return facts, rows


def _facts(model: Any) -> dict[str, Any]:
    """What all rows share."""
    cache = model.expert_cache
    return {
        "model_class": type(model).__name__,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_layers": len(cache.providers),
        "num_experts": min(p.store.num_experts for p in cache.providers),
        "expert_nbytes": max(p.store.layout.nbytes for p in cache.providers),
    }


def _verified(model: Any, resident: Resident) -> Row:
    """Whether a cache gives the resident model's bits; None where there is nothing to compare."""
    ids, expected = resident.ids, resident.expected
    if not expected:
        return {"verified": None, "first_difference": None}
    set_algorithm(model, "eager")
    found = record(model, ids, likeliest(expected), len(expected))
    set_algorithm(model, "auto")
    difference = first_difference(expected, found, len(ids))
    return {"verified": difference is None, "first_difference": difference}


def _about(model: Any, size: str) -> Row:
    cache = model.expert_cache
    return {
        "size": size,
        "capacity": cache.capacity,
        "policy": cache.policy,
        "packing": cache.packing,
        "prefetch": cache.prefetch,
        "cache_mode": cache.mode,
        "cache_mode_reason": cache.mode_reason,
    }


def _decoded(source: Source, model: Any, wanted: Wanted, batch: int) -> Found:
    """The first group cold, then the others and the first again."""
    cache = getattr(model, "expert_cache", None)
    decoder = Decoder(
        model,
        batch=batch,
        max_positions=wanted.max_positions,
        uses_graph=model.device.type == "cuda" and (cache is None or cache.mode == "device"),
        for_tokens=(lambda n: None) if cache is not None else _like_the_cache(model),
    )
    groups = source.groups(model, batch, wanted.prompt_tokens)
    decoder.sequence(groups[0].prompt, groups[0].show, _WARM_UP_STEPS)  # kernels, not slots
    if cache is not None:
        cache.reset()
    return [
        (group.name, decoder.sequence(group.prompt, group.show, wanted.steps))
        for group in (*groups, groups[0])
    ]


def _like_the_cache(model: Any) -> Callable[[int], None]:
    """Let the resident model multiply as a cached one does by itself."""
    top_k = top_k_of(model.config.get_text_config(), BATCHED_MAX_PAIRS)

    def choose(num_tokens: int) -> None:
        is_few = model.device.type == "cuda" and num_tokens * top_k <= BATCHED_MAX_PAIRS
        model.set_experts_implementation("batched_mm" if is_few else "grouped_mm")

    return choose
