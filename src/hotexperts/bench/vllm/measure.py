"""The measurement of a shape in vLLM: every expert resident first, then each number of slots."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hotexperts.bench.measure import LINK_EXPERTS
from hotexperts.bench.routing import Routing
from hotexperts.bench.rows import Found, Row, cached_row, name_of, resident_row
from hotexperts.bench.shapes import Shape
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
# of a wave. Another expert's row changes it by whole units.
_TOLERANCE_OF_4_BITS, _TOLERANCE_ON_CPU = 0.3, 0.05


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
    if asked.has_resident:
        with resident_fits():
            engine.use_slots(0)
        expected = _likeliest(decoder, asked)
        for batch in asked.batches:
            row = resident_row(_decoded(decoder, asked, batch), batch, asked.prompt_tokens)
            resident_ms[batch] = row["warm"]["prefill_ms"], row["warm"]["step_ms"]
            rows.append({"capacity": None, "load_seconds": seconds, "batch": batch, **row})
        on_done()
    for size in asked.sizes:
        engine.use_slots(size)
        about = _about(engine, size) | {"load_seconds": seconds, "link_gb_s": link}
        about |= verified(_likeliest(decoder, asked), expected, facts["tolerance"])
        for batch in asked.batches:
            row = {**about, "batch": batch}
            if about["verified"] is not False:
                found = _decoded(decoder, asked, batch)
                known = resident_ms.get(batch)
                row |= cached_row(found, batch, asked.prompt_tokens, known, link)
            rows.append(row)
        on_done()
    return {**facts, "rows": rows}


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
        "tolerance": _tolerance(asked.shape),
    }


def _tolerance(shape: Shape) -> float:
    if not torch.cuda.is_available():
        return _TOLERANCE_ON_CPU
    return 0.0 if shape.quantization is None else _TOLERANCE_OF_4_BITS


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


def _likeliest(decoder: Decoder, asked: Asked) -> Likeliest:
    batch = max(asked.batches)
    return decoder.likeliest(range(batch), asked.prompt_tokens, min(_VERIFY_TOKENS, asked.steps))


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
