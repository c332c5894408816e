"""Routing for benchmarks that need no recording: the same on every machine."""

from __future__ import annotations

import numpy as np

from hotexperts.simulate.generate import TraceSize, generate
from hotexperts.simulate.trace import Trace

SEED = 7


def drawn(top_k: int = 8) -> Trace:
    """48 sequences of 300 tokens, 4 layers, `top_k` of 128 experts; all of it decode."""
    size = TraceSize(num_sequences=48, num_tokens=300, num_layers=4, num_experts=128, top_k=top_k)
    ids = np.stack(list(generate("fitted", size, SEED))).reshape(-1, 4, top_k)
    sequences = np.repeat(np.arange(48), 300)
    return Trace(ids, np.ones(len(ids), np.int32), sequences, {"n_experts": 128})
