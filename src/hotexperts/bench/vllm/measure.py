"""The measurement of a shape in vLLM: every expert resident first, then each number of slots."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hotexperts.bench.measure import LINK_EXPERTS
from hotexperts.bench.routing import Routing
from hotexperts.bench.rows import Found, Row, add_each, cached_row, name_of, resident_row
from hotexperts.bench.sources import resident_fits
from hotexperts.bench.vllm.decode import Decoder, Likeliest, verified
from hotexperts.bench.vllm.engine import Engine
from hotexperts.bench.vllm.options import Asked, engine_options
from hotexperts.bench.vllm.replay import SequenceReplay
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.link import link_gb_s
from hotexperts.cache.packed_store import PackedBackingStore

_WARM_UP_STEPS = 2
_VERIFY_TOKENS = 8
# Of a log probability. Kernels for 4 bits split a sum by the order of their blocks, which follows
# the slots, and round to bfloat16 in another place, in every layer; those for CPUs add up the parts
# of a wave. How far that goes in a model, its own rows tell, decoded together and one by one: twice
# as much may differ, but no less and no more than this. Another expert's row changes whole units.
_LEAST_OF_4_BITS, _LEAST_ON_CPU, _MOST = 0.3, 0.05, 0.8


def measure(asked: Asked, routing: Routing, on_done: Callable[[], None]) -> dict[str, Any]:
    """Rows of every number of slots and batch, as `hotexperts.bench.measure.measure` gives them.

    Args:
        asked: what to measure.
        routing: what the routers answer.
        on_done: called after the resident model and after each cache.

    Raises:
        ConfigError: the resident model does not fit.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(asked, is_gpu=torch.cuda.is_available())
        engine = Engine(Path(folder), asked.shape.sizes, **options)
    seconds = time.perf_counter() - start
    decoder = Decoder(engine, SequenceReplay(engine, routing.ids))
    facts = _facts(engine, asked)
    link = link_gb_s(LINK_EXPERTS * facts["expert_nbytes"], engine.runner.device)
    rows: list[Row] = []
    resident_ms: dict[int, tuple[float, float]] = {}
    expected: Likeliest = []
    tolerance = None
    if asked.has_resident:
        with resident_fits():
            engine.use_slots(0)
        expected = _likeliest(decoder, asked)
        tolerance = _tolerance(decoder, asked, expected)
        for batch in asked.batches:
            row = resident_row(_decoded(decoder, asked, batch), batch, asked.prompt_tokens)
            resident_ms[batch] = row["warm"]["prefill_ms"], row["warm"]["step_ms"]
            rows.append({"capacity": None, "load_seconds": seconds, "batch": batch, **row})
        on_done()

    def of_size(size: int) -> list[Row]:
        engine.use_slots(size)
        about = _about(engine, size) | {"load_seconds": seconds, "link_gb_s": link}
        about |= verified(_likeliest(decoder, asked), expected, tolerance or 0.0)
        found = [{**about, "batch": batch} for batch in asked.batches]
        for row in found if about["verified"] is not False else ():
            batch = row["batch"]
            taken, known = _decoded(decoder, asked, batch), resident_ms.get(batch)
            row |= cached_row(taken, batch, asked.prompt_tokens, known, link)
        on_done()
        return found

    stopped = add_each(rows, asked.sizes, of_size)
    return {**facts, "tolerance": tolerance, **stopped, "rows": rows}


def _facts(engine: Engine, asked: Asked) -> dict[str, Any]:
    """What all rows share."""
    import vllm

    stores = list(engine.caches.stores.values())
    method = asked.shape.quantization
    return {
        "model_class": f"{asked.shape.sizes['architectures'][0]} in vLLM {vllm.__version__}",
        "device": str(engine.runner.device),
        "dtype": "bfloat16" + (f", experts in {method}" if method else ""),
        "num_layers": len(stores),
        "num_experts": min(store.num_experts for store in stores),
        "expert_nbytes": max(store.layout.nbytes for store in stores),
    }


def _tolerance(decoder: Decoder, asked: Asked, expected: Likeliest) -> float:
    """What a log probability may be off by; 0 where kernels compute the same bits in any slots."""
    is_gpu = torch.cuda.is_available()
    if is_gpu and asked.shape.quantization is None:
        return 0.0
    rows = range(max(asked.batches))
    alone = [one for row in rows for one in _likeliest(decoder, asked, [row])]
    rounding = verified(alone, expected, math.inf)["largest_difference"]
    least = _LEAST_OF_4_BITS if is_gpu else _LEAST_ON_CPU
    return float(min(max(least, 2 * rounding), _MOST))


def _about(engine: Engine, size: int) -> Row:
    caches = engine.caches
    providers = caches.providers.values()
    is_packed = any(isinstance(s, PackedBackingStore) for s in caches.stores.values())
    is_device = all(isinstance(provider, DeviceWeightProvider) for provider in providers)
    return {
        "size": str(size),
        "capacity": caches.capacity,
        "policy": caches.options.cache.policy,
        "packing": "packed12" if is_packed else "none",
        "cache_mode": "device" if is_device else "host",
        "cache_mode_reason": None,
    }


def _likeliest(decoder: Decoder, asked: Asked, rows: Sequence[int] | None = None) -> Likeliest:
    """Of these rows together; of the largest batch by default."""
    rows = range(max(asked.batches)) if rows is None else rows
    return decoder.likeliest(rows, asked.prompt_tokens, min(_VERIFY_TOKENS, asked.steps))


def _decoded(decoder: Decoder, asked: Asked, batch: int) -> Found:
    """The first group cold, then the others and the first again."""
    engine = decoder.engine
    groups = [range(first, first + batch) for first in range(0, asked.num_groups * batch, batch)]
    decoder.sequence(groups[0], asked.prompt_tokens, _WARM_UP_STEPS)  # kernels, not slots
    if engine.has_slots:
        engine.caches.reset()
    return [
        (name_of(rows[0], batch), decoder.sequence(rows, asked.prompt_tokens, asked.steps))
        for rows in (*groups, groups[0])
    ]
