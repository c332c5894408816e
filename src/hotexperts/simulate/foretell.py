"""What a predictor is told during a replay, and which predictors a trace allows."""

from __future__ import annotations

from typing import Literal

from hotexperts.errors import ConfigError
from hotexperts.predict import PREDICTORS, Hints, Predictor
from hotexperts.simulate.request_map import RequestMap
from hotexperts.simulate.schedule import LayerCall
from hotexperts.simulate.trace import NOT_RECORDED, Trace

Tap = Literal["output", "input"]
SIMULATED = {RequestMap.name: RequestMap}  # beside those that an engine can run


def check_predictor(name: str, trace: Trace, batch: int, ahead: int, tap: Tap) -> type[Predictor]:
    """The predictor's class, if the trace holds what it needs.

    Raises:
        ConfigError: an unknown predictor, guesses that are not recorded, more lanes than a
            predictor follows, or a look-ahead beyond the layers.
    """
    found = SIMULATED.get(name) or PREDICTORS.load(name)
    if not 1 <= ahead <= trace.num_layers:
        raise ConfigError(
            f"{ahead} layers ahead, and the trace has {trace.num_layers}: give 1 to "
            f"{trace.num_layers}"
        )
    if "requests" in found.needs and batch > 1:
        raise ConfigError(f"predictor {name!r} follows one request at a time: give batch 1")
    if "gate" in found.needs and not has_gate(trace, ahead, tap):
        raise ConfigError(f"predictor {name!r} needs {_missing(trace, ahead, tap)}")
    return found


def has_gate(trace: Trace, ahead: int, tap: Tap) -> bool:
    """Whether the router's guesses are recorded for that look-ahead and tap."""
    return ahead == 1 and tap in trace.guesses


def hints_of(trace: Trace, tokens: list[int], call: LayerCall, tap: Tap | None) -> Hints:
    """What there is to know of a call; tap is None where no guesses are to be used."""
    if tap is None:
        return Hints(truth=call.demand)
    rows = trace.guesses[tap][tokens, call.layer]
    return Hints([row[row != NOT_RECORDED].tolist() for row in rows], call.demand)


def _missing(trace: Trace, ahead: int, tap: Tap) -> str:
    if ahead > 1:
        return (
            f"guesses {ahead} layers ahead; traces hold those of 1 layer: give that, or 'combined'"
        )
    recorded = ", ".join(trace.guesses) or "none"
    return (
        f"the router's guesses at the layer's {tap}, and the trace holds {recorded}: record them "
        "(docs/traces.md), or take 'combined', which does without"
    )
