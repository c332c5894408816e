"""A replay with prefetch and with time: guesses travel while layers compute.

A transfer takes an expert's bytes over the link, which carries one after the other in the order in
which they were asked for. A layer first computes what comes before its experts; then its router
knows the demand. It waits for its own guesses, all of them, as an engine that joins its copy stream
does; what is missing after that is fetched while nothing computes; then its experts compute. At the
tap, before the experts or after them, the guesses for a later layer are asked for.

Guesses lie in staging rows beside the cache and are gone after the call that they are for. They
never evict. A used one is a miss to the policy, which admits it or not as if there were no
prefetch, so that the cache holds the same experts at any time with and without: what prefetch does
is coverage of misses, on top of the cache's own hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hotexperts.policy import Policy
from hotexperts.predict import Control, Hints, Predictor
from hotexperts.predict.base import to_chance
from hotexperts.residency import Residency
from hotexperts.simulate.cost import NO_COST, Cost
from hotexperts.simulate.foretell import check_predictor, has_gate, hints_of
from hotexperts.simulate.players import player
from hotexperts.simulate.prefetch import Prefetch, PrefetchOutcome, PrefetchStats
from hotexperts.simulate.rules import ENGINE, Rules
from hotexperts.simulate.schedule import (
    LayerCall,
    Prefill,
    Step,
    cut_at_ends,
    layer_calls,
    schedule,
)
from hotexperts.simulate.streams import check_capacity, preload_calls, preload_uses
from hotexperts.simulate.timeline import Timeline
from hotexperts.simulate.trace import Trace


def replay_prefetch(
    trace: Trace,
    policy: str,
    capacity: int,
    predictor: str,
    prefetch: Prefetch,
    batch: int = 1,
    prefill: Prefill = "warm",
    rules: Rules = ENGINE,
    cost: Cost = NO_COST,
    nbytes: int | None = None,
) -> PrefetchOutcome:
    """Play a trace from a cold start, guessing in decode; predictors learn in a warm prefill too.

    Args:
        trace: see `replay`.
        policy: see `replay`.
        capacity: see `replay`.
        predictor: one of `PREDICTORS`, "request-map", or "module:Class".
        prefetch: how.
        batch: see `replay`.
        prefill: see `replay`.
        rules: see `replay`; layers have slots of their own.
        cost: the link, and what layers compute.
        nbytes: of an expert; None where slack is unlimited and bytes are no budget.

    Raises:
        ConfigError: see `replay`, `check_predictor` and `Prefetch.check`.
    """
    check_capacity(trace, capacity, rules)
    prefetch.check(rules, cost, nbytes)
    chosen = check_predictor(predictor, trace, batch, prefetch.ahead, prefetch.tap)
    create, heat = player(policy, trace.num_layers, rules), preload_uses(trace, rules)
    steps = schedule(trace, batch, prefill)
    layers = tuple(PrefetchStats() for _ in range(trace.num_layers))
    ms = 0.0 if prefetch.slack == "compute" else None
    top_k = trace.ids.shape[2]
    with_gate = has_gate(trace, prefetch.ahead, prefetch.tap)
    for run in cut_at_ends(trace, steps) if rules.sequences == "cold" else [steps]:
        guesser = chosen(
            trace.num_layers, trace.num_experts, top_k, prefetch.ahead, with_gate=with_gate
        )
        control = Control(trace.num_layers, prefetch.max_guesses(top_k, nbytes), prefetch.ratio)
        caches = [_Cache(create(trace.num_experts, capacity)) for _ in range(trace.num_layers)]
        for layer, cache in enumerate(caches):
            for call in preload_calls(heat[layer], capacity, rules):
                cache.decide(call)
        timeline = None
        if nbytes is not None and prefetch.slack == "compute":
            at_output = prefetch.tap == "output"
            timeline = Timeline(cost, nbytes, at_output=at_output)
        _Run(trace, prefetch, guesser, control, caches, timeline, layers).play(
            [(step, call) for step in run for call in _calls(trace, step, rules)], batch
        )
        if timeline is not None:
            ms = (ms or 0.0) + timeline.now
    return PrefetchOutcome(layers, ms)


def _calls(trace: Trace, step: Step, rules: Rules) -> Iterable[LayerCall]:
    return layer_calls(trace, [step], *range(trace.num_layers), ties=rules.ties)


class _Cache:
    """One layer's slots."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.ledger = Residency(policy.num_experts, policy.capacity)

    def decide(self, call: LayerCall) -> list[int]:
        """Play a call; the experts that it missed."""
        missed = [expert for expert in call.demand if expert not in self.ledger.residents]
        found = self.policy.decide(
            call.demand, call.counts, self.ledger.residents, self.ledger.num_free, evict=call.evict
        )
        self.ledger.apply(found)
        return missed


@dataclass(slots=True)
class _Run:
    """The calls from one cold start to the next."""

    trace: Trace
    prefetch: Prefetch
    guesser: Predictor
    control: Control
    caches: list[_Cache]
    timeline: Timeline | None
    layers: Sequence[PrefetchStats]
    staged: dict[int, dict[int, float]] = field(default_factory=dict)  # by call: expert, arrival

    def play(self, calls: list[tuple[Step, LayerCall]], batch: int) -> None:
        sequence = -1
        for at, (step, call) in enumerate(calls):
            if batch == 1 and (now := int(self.trace.seq[step.tokens[0]])) != sequence:
                self.guesser.begin()
                sequence = now
            self._serve(at, call)
            if call.evict:  # a prefill at once asks for nearly all, which says nothing of decode
                self.guesser.observe(call.layer, call.demand, self._hints(step, call))
            if call.counted and self.prefetch.tap == "output":
                self._compute_experts()
            if call.counted:
                self._guess(at, calls)
            if call.counted and self.prefetch.tap == "input":
                self._compute_experts()
        for stats, layer in zip(self.layers, self.control.layers, strict=True):
            stats.num_off = int(not layer.is_on)

    def _serve(self, at: int, call: LayerCall) -> None:
        missed = self.caches[call.layer].decide(call)
        if not call.counted:
            return
        staged = self.staged.pop(at, {})
        covered = [expert for expert in missed if expert in staged]
        late = 0
        if self.timeline is not None:
            self.timeline.reach_router()
            late = self.timeline.num_late([staged[expert] for expert in covered])
            self.timeline.fetch(staged.values(), len(missed) - len(covered))
        self.control.record(call.layer, len(missed), len(staged), len(covered), late)
        stats = self.layers[call.layer]
        stats.calls += 1
        stats.hits += len(call.demand) - len(missed)
        stats.misses += len(missed)
        stats.issued += len(staged)
        stats.covered += len(covered)
        stats.late += late

    def _compute_experts(self) -> None:
        if self.timeline is not None:
            self.timeline.compute_experts()

    def _guess(self, at: int, calls: list[tuple[Step, LayerCall]]) -> None:
        """Ask for what the call `ahead` further on is expected to miss."""
        layer = (calls[at][1].layer + self.prefetch.ahead) % self.trace.num_layers
        target = next((n for n in range(at + 1, len(calls)) if calls[n][1].layer == layer), None)
        if target is None or not calls[target][1].counted or target in self.staged:
            return
        self.staged[target] = self._transfer(layer, *calls[target])

    def _transfer(self, layer: int, step: Step, call: LayerCall) -> dict[int, float]:
        if not self.control.layers[layer].is_on:
            return {}
        chances = to_chance(self.guesser.guess(layer, self._hints(step, call))).tolist()
        resident = self.caches[layer].ledger.residents
        candidates = [item for item in enumerate(chances) if item[0] not in resident]
        if self.timeline is None:
            return dict.fromkeys(self.control.choose(layer, candidates), 0.0)
        hidden = self.timeline.hidden(self.control.max_guesses)
        return {e: self.timeline.transfer() for e in self.control.choose(layer, candidates, hidden)}

    def _hints(self, step: Step, call: LayerCall) -> Hints:
        tap = self.prefetch.tap if self.guesser.with_gate else None
        return hints_of(self.trace, step.tokens, call, tap)
