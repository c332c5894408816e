"""Replays with prefetch: by hand, against a twin that keeps time by listing events, and bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotexperts.errors import ConfigError
from hotexperts.simulate import Rules, Trace, TraceError, read_trace, replay, write_trace
from hotexperts.simulate.cost import Cost
from hotexperts.simulate.prefetch import Prefetch, PrefetchOutcome, PrefetchStats
from hotexperts.simulate.prefetch_replay import replay_prefetch
from simulate.models import layered
from simulate.scripted import EXPERTS, script

NBYTES = 1_000_000  # 1 ms on a link of 1 GB/s
LINK = 1.0
HERE = "simulate.scripted"


DEMANDS = st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=3)


def run(
    trace: Trace, predictor: str, how: Prefetch, slots: int = 2, **cost: float
) -> PrefetchStats:
    return outcome(trace, predictor, how, slots, **cost).total


def outcome(
    trace: Trace, predictor: str, how: Prefetch, slots: int = 2, **cost: float
) -> PrefetchOutcome:
    name = f"{HERE}:{predictor}" if predictor[0].isupper() else predictor
    nbytes = None if how.slack == "unlimited" else NBYTES
    return replay_prefetch(trace, "lru", slots, name, how, cost=Cost(LINK, **cost), nbytes=nbytes)


def test_counted_by_hand() -> None:
    # One slot a layer, so that all misses. Guesses one layer ahead, from the output: 0.5 ms of the
    # next layer's 1 ms passes before its router, so half of a transfer of 1 ms is hidden.
    trace = layered("A/B A/C D/B")
    found = run(trace, "oracle", Prefetch(ratio=None), 1, compute_ms=1.0)
    # .5 router, 1 fetch A, .5 experts; .5, wait .5 for B, .5, then the next token: A is resident;
    # C was guessed for layer 1: .5 + .5 wait + .5 and so on; D: for layer 0 of the third token.
    assert (found.hits, found.misses, found.covered, found.issued) == (1, 5, 4, 4)
    assert (found.late, found.wasted) == (4, 0)
    assert found.ms == pytest.approx((1 + 1) + (1 + 0.5) + 1 + (1 + 0.5) + (1 + 0.5) + (1 + 0.5))
    assert found.stall_free_rate == 1 / 6
    early = run(trace, "oracle", Prefetch(ratio=None, tap="input"), 1, compute_ms=1.0)
    assert (early.late, early.ms) == (0, pytest.approx(6 * 1 + 1))  # the first miss alone
    assert early.stall_free_rate == 5 / 6


def test_a_wrong_guess_makes_its_layer_wait() -> None:
    trace = layered("A/B")
    # 6 wrong guesses for layer 1 (B is not among them, and A is resident nowhere else): 7 absent
    found = run(trace, "Wrong", Prefetch(ratio=None, rows=2, tap="input"), 1, compute_ms=2.0)
    assert (found.issued, found.wasted, found.covered) == (2, 2, 0)
    assert found.ms == pytest.approx(2 + 1 + 2 + 1)  # both wrong ones hid behind 2 ms
    assert found.relative_bytes == 2.0


def test_without_guesses_the_time_is_that_of_a_plain_replay() -> None:
    trace = layered("A/B BC/C A/D", "DE/A A/B")
    found = run(trace, "Nothing", Prefetch(), compute_ms=0.3, moe_share=0.25)
    plain = replay(trace, "lru", 2).total
    assert (found.hits, found.misses, found.issued) == (plain.hits, plain.misses, 0)
    steps = 5
    expected = Cost(LINK, 0.3).ms_per_token(plain.misses * NBYTES, 2, steps, 1)
    assert found.ms == pytest.approx(expected * steps)


def twin(trace: Trace, slots: int, how: Prefetch, compute_ms: float, share: float) -> list[float]:
    """LRU, Scripted, one sequence of decode: hits, misses, issued, covered, late, ms."""
    ids = trace.ids
    num_tokens, num_layers = ids.shape[:2]
    assert how.rows is not None
    cache: list[list[int]] = [[] for _ in range(num_layers)]  # longest unused first
    sent: dict[int, list[tuple[int, float]]] = {}
    transfers: list[float] = [0.0]  # when each ended
    hits = misses = issued = covered = late = 0
    now = 0.0
    for call, (token, layer) in enumerate(itertools.product(range(num_tokens), range(num_layers))):
        demand = sorted(int(e) for e in ids[token, layer] if e >= 0)
        now += compute_ms * (1 - share)
        mine = sent.pop(call, [])
        absent = [e for e in demand if e not in cache[layer]]
        late += sum(e in absent and arrival > now for e, arrival in mine)
        now = max([now, *(arrival for _, arrival in mine)])
        here = [e for e, _ in mine]
        for expert in absent:
            if expert not in here:
                transfers.append(max(now, transfers[-1]) + 1.0)
        if any(e not in here for e in absent):
            now = transfers[-1]
        hits += len(demand) - len(absent)
        misses += len(absent)
        issued += len(mine)
        covered += sum(e in here for e in absent)
        place_demand(cache[layer], demand, slots)
        if how.tap == "output":
            now += compute_ms * share
        target = call + how.ahead
        if target < num_tokens * num_layers:
            to = target % num_layers
            slack = compute_ms - (compute_ms * share if how.tap == "output" else 0)
            wanted = [e for e in script(to, target // num_layers) if e not in cache[to]][: how.rows]
            deadline = now + slack
            sent[target] = []
            for expert in wanted:
                start = max(now, transfers[-1])
                if deadline - start < 1e-4:  # nothing of it would be hidden
                    break
                transfers.append(start + 1.0)
                sent[target].append((expert, transfers[-1]))
        if how.tap == "input":
            now += compute_ms * share
    return [hits, misses, issued, covered, late, now]


def place_demand(cache: list[int], demand: list[int], slots: int) -> None:
    """LRU: of one call's experts the higher id is the more recent; none leaves in its own call."""
    missed = [e for e in demand if e not in cache]
    for expert in missed:
        if len(cache) == slots:
            others = [e for e in cache if e not in demand]
            if not others:
                break
            cache.remove(others[0])
        cache.append(expert)
    for expert in demand:
        if expert in cache:
            cache.remove(expert)
            cache.append(expert)


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(
        st.lists(DEMANDS, min_size=3, max_size=3),
        min_size=1,
        max_size=8,
    ),
    slots=st.integers(1, 5),
    ahead=st.integers(1, 3),
    rows=st.integers(1, 3),
    tap=st.sampled_from(["output", "input"]),
    compute_ms=st.sampled_from([0.1, 0.7, 1.3, 5.0]),
    share=st.sampled_from([0.0, 0.25, 1.0]),
)
def test_the_twin_agrees(
    tokens: list[list[set[int]]],
    slots: int,
    ahead: int,
    rows: int,
    tap: str,
    compute_ms: float,
    share: float,
) -> None:
    text = " ".join("/".join(letters(experts) for experts in token) for token in tokens)
    trace = layered(text)
    how = Prefetch(ahead, tap, rows, ratio=None)  # type: ignore[arg-type]
    found = run(trace, "Scripted", how, slots, compute_ms=compute_ms, moe_share=share)
    expected = twin(trace, slots, how, compute_ms, share)
    counts = [found.hits, found.misses, found.issued, found.covered, found.late]
    assert counts == expected[:5]
    assert found.ms == pytest.approx(expected[5])


def letters(experts: set[int]) -> str:
    return "".join(chr(ord("A") + e) for e in sorted(experts))


def long_trace(seed: int = 0, tokens: int = 2000) -> Trace:
    rng = np.random.default_rng(seed)
    ids = rng.random((tokens, 3, EXPERTS)).argsort(axis=2)[..., :2]
    return Trace(ids, np.ones(tokens, int), np.zeros(tokens, int), {"n_experts": EXPERTS})


@pytest.mark.parametrize("tap", ["output", "input"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_an_oracle_leaves_no_miss_where_slack_suffices(ahead: int, tap: str) -> None:
    trace = long_trace(tokens=50)
    how = Prefetch(ahead, tap, ratio=None)  # type: ignore[arg-type]
    found = outcome(trace, "oracle", how, compute_ms=10.0)
    total = found.total
    first_calls = found.layers[:ahead]  # before which no guess could be made
    assert total.misses - total.covered == 2 * len(first_calls)
    assert (total.late, total.wasted) == (0, 0)
    assert total.ms == pytest.approx(50 * 3 * 10.0 + 2 * ahead)  # 1 ms for each of these


def test_what_is_always_wrong_costs_next_to_nothing_once_it_is_off() -> None:
    trace = long_trace(tokens=6000)
    plain = run(trace, "Nothing", Prefetch(), compute_ms=0.2).ms
    how = Prefetch(ratio=None, tap="input", rows=4)
    found = run(trace, "Wrong", how, compute_ms=0.2)
    assert plain is not None
    assert found.ms is not None
    assert found.ms <= 1.02 * plain
    assert (found.num_off, found.covered) == (3, 0)
    assert found.issued > 0


@pytest.mark.parametrize("ratio", [1.0, 1.2, 1.5])
@pytest.mark.parametrize("predictor", ["popularity", "Wrong", "combined"])
def test_bytes_stay_within_the_budget(predictor: str, ratio: float) -> None:
    found = run(long_trace(), predictor, Prefetch(ratio=ratio, slack="unlimited"))
    assert found.relative_bytes <= ratio + 1e-9
    if ratio == 1.0:
        assert found.issued == 0


def test_guesses_leave_the_cache_as_it_is() -> None:
    trace = long_trace()
    plain = replay(trace, "lru", 3)
    found = outcome(trace, "oracle", Prefetch(slack="unlimited"), 3)
    assert [s.hits for s in found.layers] == [s.hits for s in plain.layers]
    assert [s.misses for s in found.layers] == [s.misses for s in plain.layers]


def test_a_budget_of_bytes_a_call_is_so_many_experts() -> None:
    trace = long_trace(tokens=20)
    how = Prefetch(ratio=None, call_nbytes=NBYTES + 1)
    found = run(trace, "oracle", how, 1, compute_ms=10.0)
    free = run(trace, "oracle", Prefetch(ratio=None), 1, compute_ms=10.0)
    assert found.issued == 59  # one for each call but the first
    assert free.issued > 59


def test_a_prompt_is_learned_from_and_not_prefetched() -> None:
    prompt, decode = " ".join(["a/b", "c/d"] * 20), "A/B C/D"
    how = Prefetch(ratio=None, rows=1, slack="unlimited")
    warm = run(layered(f"{prompt} {decode}"), "cross-markov", how, 1)
    assert (warm.demands, warm.misses, warm.covered) == (4, 4, 3)  # the first follows a prompt
    cold = run(layered(decode), "cross-markov", how, 1)
    assert cold.covered == 0


def test_cold_sequences_forget_what_was_learned() -> None:
    again = " ".join(["A/B C/D"] * 20)
    trace = layered(again, again)
    how = Prefetch(ratio=None, slack="unlimited")
    warm = replay_prefetch(trace, "lru", 1, "cross-lift", how).total
    cold = replay_prefetch(trace, "lru", 1, "cross-lift", how, rules=Rules(sequences="cold")).total
    one = replay_prefetch(layered(again), "lru", 1, "cross-lift", how).total
    assert (cold.covered, cold.issued) == (2 * one.covered, 2 * one.issued)
    assert warm.covered > cold.covered


def test_the_union_of_a_batch_is_guessed() -> None:
    trace = layered("A/B C/D A/B", "C/D A/B C/D")
    how = Prefetch(ratio=None, slack="unlimited", rows=8)
    found = replay_prefetch(trace, "lru", 1, "oracle", how, batch=2).total
    assert (found.demands, found.covered) == (12, found.misses - 2)


def test_a_gate_reads_its_own_tap() -> None:
    ids = np.array([[[0], [1]], [[0], [2]], [[0], [1]]])
    right = np.array([[[-1], [1]], [[-1], [2]], [[-1], [1]]])
    wrong = np.full_like(right, 5)
    trace = Trace(
        ids, np.ones(3, int), np.zeros(3, int), {"n_experts": 8}, {"output": right, "input": wrong}
    )
    for tap, covered in (("output", 3), ("input", 0)):
        how = Prefetch(1, tap, 1, None, slack="unlimited")  # type: ignore[arg-type]
        assert run(trace, "gate", how, 1).covered == covered


@pytest.mark.parametrize(
    "change",
    [lambda g: g[:, :1], lambda g: g + 8, lambda g: g * 0, lambda g: g / 2],
    ids=["a layer short", "beyond the experts", "twice", "no integers"],
)
def test_guesses_that_fit_no_trace(change: Callable[[np.ndarray], np.ndarray]) -> None:
    ids = np.array([[[0], [1]]])
    guesses = change(np.array([[[0, 1], [1, 2]]]))
    with pytest.raises(TraceError, match="guesses of output"):
        Trace(ids, np.ones(1, int), np.zeros(1, int), {"n_experts": 8}, {"output": guesses})


def test_guesses_survive_a_file(tmp_path: Path) -> None:
    guesses = {"output": np.array([[[-1, -1], [2, 0]]]), "input": np.array([[[-1], [7]]])}
    trace = Trace(np.array([[[0], [1]]]), np.ones(1, int), np.zeros(1, int), {}, {})
    trace = Trace(trace.ids, trace.phase, trace.seq, {"n_experts": 8}, guesses)
    write_trace(trace, tmp_path / "t.npz")
    found = read_trace(tmp_path / "t.npz")
    assert {tap: g.tolist() for tap, g in found.guesses.items()} == {
        tap: g.tolist() for tap, g in guesses.items()
    }
    with pytest.raises(TraceError, match=r"guesses: end the name in \.npz"):
        write_trace(trace, tmp_path / "t.jsonl")


def test_guesses_by_sequence_are_moved_to_the_layer_that_they_are_about(tmp_path: Path) -> None:
    ids = np.zeros((1, 130, 3, 1), np.uint8)
    made_in = np.full((1, 130, 2, 2), (1, 2), np.uint8)
    ids[..., 0, 0, 0] = 3
    np.savez(tmp_path / "s.npz", ids=ids, next_layer_from_output=made_in)
    trace = read_trace(tmp_path / "s.npz")
    assert trace.guesses["output"][0].tolist() == [[-1, -1], [1, 2], [1, 2]]
    assert list(trace.guesses) == ["output"]
    np.savez(tmp_path / "b.npz", ids=ids, next_layer_from_output=made_in[:, :, :1])
    with pytest.raises(TraceError, match=r"next_layer_from_output.*give \[1, 130, 2, n\]"):
        read_trace(tmp_path / "b.npz")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"how": Prefetch(2), "predictor": "gate"}, "guesses 2 layers ahead"),
        ({"how": Prefetch(), "predictor": "gate"}, "guesses at the layer's output.*holds none"),
        ({"how": Prefetch(4)}, "4 layers ahead, and the trace has 3: give 1 to 3"),
        ({"predictor": "request-map", "batch": 2}, "one request at a time: give batch 1"),
        ({"predictor": "psychic"}, "unknown predictor 'psychic'"),
        ({"cost": Cost(LINK)}, "computes for 0 ms: give --compute-ms"),
        ({"nbytes": None}, "give --expert-mb"),
        ({"how": Prefetch(call_nbytes=5)}, "budget of 5 bytes a call, and an expert has 1000000"),
        ({"rules": Rules(pool="global")}, "prefetch with pool 'global': give pool 'layer'"),
    ],
)
def test_what_cannot_be_replayed(options: dict[str, object], message: str) -> None:
    trace = layered("A/B/C A/B/C", "A/B/C")
    given = {
        "predictor": "oracle",
        "how": Prefetch(),
        "batch": 1,
        "rules": Rules(),
        "cost": Cost(LINK, 1.0),
        "nbytes": NBYTES,
        **options,
    }
    with pytest.raises(ConfigError, match=message):
        replay_prefetch(
            trace,
            "lru",
            2,
            given["predictor"],  # type: ignore[arg-type]
            given["how"],  # type: ignore[arg-type]
            given["batch"],  # type: ignore[arg-type]
            "warm",
            given["rules"],  # type: ignore[arg-type]
            given["cost"],  # type: ignore[arg-type]
            given["nbytes"],  # type: ignore[arg-type]
        )


def test_nothing_demanded_twice_has_no_rate() -> None:
    empty = PrefetchStats()
    assert math.isnan(empty.stall_free_rate)
    assert math.isnan(empty.relative_bytes)
