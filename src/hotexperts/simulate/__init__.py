"""Recorded routing and what a cache would have made of it; needs no model and no tensors."""

from hotexperts.simulate.bounds import belady, bound
from hotexperts.simulate.files import read_trace, write_trace
from hotexperts.simulate.replay import Outcome, replay
from hotexperts.simulate.rules import Rules
from hotexperts.simulate.trace import Trace, TraceError

__all__ = [
    "Outcome",
    "Rules",
    "Trace",
    "TraceError",
    "belady",
    "bound",
    "read_trace",
    "replay",
    "write_trace",
]
