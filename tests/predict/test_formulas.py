"""Each predictor's formula, worked by hand on a handful of calls."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hotexperts.predict import PREDICTORS, Hints, Predictor
from hotexperts.predict.gate import best_ranks
from hotexperts.predict.online import Dense, Table
from hotexperts.simulate.request_map import RequestMap

BASE = 0.25  # one of four experts


def made(name: str, num_layers: int = 2, ahead: int = 1, *, with_gate: bool = False) -> Predictor:
    return PREDICTORS.load(name)(num_layers, 4, 1, ahead, with_gate=with_gate)


def logit(chance: float) -> float:
    return math.log(chance / (1 - chance))


def assert_log_odds(guess: object, *expected: float) -> None:
    assert np.asarray(guess) == pytest.approx(expected, abs=1e-5)


def test_popularity_counts_beside_a_prior_of_two_calls() -> None:
    predictor = made("popularity")
    for demand in ([0], [0], [0, 3]):
        predictor.observe(1, demand)
    assert_log_odds(predictor.guess(1), *(logit((n + 2 * BASE) / 5) for n in (3, 0, 0, 1)))
    assert_log_odds(predictor.guess(0), *[logit(BASE)] * 4)


def test_ewma_decays_from_the_base_rate() -> None:
    predictor = made("ewma")
    predictor.observe(0, [2])
    used, other = 0.95 * BASE + 0.05, 0.95 * BASE
    expected = [logit(0.98 * s + 0.02 * BASE) for s in (other, other, used, other)]
    assert_log_odds(predictor.guess(0), *expected)


def test_previous_knows_two_chances() -> None:
    predictor = made("previous")
    for demand in ([0], [0], [1]):
        predictor.observe(0, demand)
    # of last experts 1 of 2 came again; of the others, of which the first call had 4, 2 of 10 came
    again, other = (1 + BASE) / 3, (2 + BASE) / 11
    assert_log_odds(predictor.guess(0), *(logit(p) for p in (other, again, other, other)))


def test_the_cross_layer_chances() -> None:
    # Two tokens: layer 0 asks for 0 then 1, layer 1 for 2 then 3; now layer 0 asks for 0 again.
    markov, lift = made("cross-markov"), made("cross-lift")
    for predictor in (markov, lift):
        for layer, expert in ((0, 0), (1, 2), (0, 1), (1, 3), (0, 0)):
            predictor.observe(layer, [expert])
    often, never = (1 + 2 * BASE) / 4, 2 * BASE / 4
    after_0 = [never * 2 / 3, never * 2 / 3, (1 + 2 * often) / 3, often * 2 / 3]
    assert_log_odds(markov.guess(1), *(logit(p) for p in after_0))
    popular = [never, never, often, often]
    expected = [logit(p) + math.log(q / p) for p, q in zip(popular, after_0, strict=True)]
    assert_log_odds(lift.guess(1), *expected)


def test_lifts_of_several_experts_add_up_and_chances_are_averaged() -> None:
    markov, lift = made("cross-markov"), made("cross-lift")
    for predictor in (markov, lift):
        for layer, demand in ((0, [0, 1]), (1, [2]), (0, [0, 3])):
            predictor.observe(layer, demand)
    popular = (1 + 2 * BASE) / 3
    of_0, of_3 = (1 + 2 * popular) / 3, popular
    assert markov.guess(1)[2] == pytest.approx(logit((of_0 + of_3) / 2), abs=1e-5)
    assert lift.guess(1)[2] == pytest.approx(logit(popular) + math.log(of_0 / popular), abs=1e-5)


def test_the_temporal_ones_look_at_their_own_layer() -> None:
    predictor = made("temporal-markov")
    for layer, expert in ((0, 0), (1, 3), (0, 1), (1, 3), (0, 0)):
        predictor.observe(layer, [expert])
    # layer 0 went 0, 1, 0: after 0 came 1, once
    popular = [(2 + 0.5) / 5, (1 + 0.5) / 5, 0.5 / 5, 0.5 / 5]
    expected = [(n + 2 * p) / 3 for n, p in zip((0, 1, 0, 0), popular, strict=True)]
    assert_log_odds(predictor.guess(0), *(logit(p) for p in expected))
    lift = made("temporal-lift")
    for layer, expert in ((0, 0), (1, 3), (0, 1), (1, 3), (0, 0)):
        lift.observe(layer, [expert])
    lifted = [logit(p) + math.log(q / p) for p, q in zip(popular, expected, strict=True)]
    assert_log_odds(lift.guess(0), *lifted)


@pytest.mark.parametrize(("ahead", "source"), [(1, 0), (2, 3), (3, 2)])
def test_the_source_is_so_many_calls_before(ahead: int, source: int) -> None:
    predictor = made("cross-markov", num_layers=4, ahead=ahead)
    for layer in (0, 1, 2, 3, 0):
        predictor.observe(layer, [layer])
    assert predictor.source(1).tolist() == [source]
    stride = made("stride", num_layers=4, ahead=ahead)
    for layer in (0, 1, 2, 3, 0):
        stride.observe(layer, [layer])
    assert stride.source(1).tolist() == [3 if ahead == 1 else source]


def test_a_rank_is_worth_how_often_it_was_right() -> None:
    gate = made("gate", with_gate=True)
    hints = Hints([[3, 1]])
    assert_log_odds(gate.guess(1, hints), *(logit(p) for p in (BASE, 0.575, BASE, 0.9)))
    gate.observe(1, [1], hints)  # the second rank was right
    first, second, unranked = 2 * 0.9 / 3, (1 + 2 * 0.575) / 3, 2 * BASE / 4
    expected = [unranked, second, unranked, first]
    assert_log_odds(gate.guess(1, hints), *(logit(p) for p in expected))
    assert_log_odds(gate.guess(1, Hints([[], []])), *[logit(BASE)] * 4)


def test_in_a_batch_the_best_rank_counts() -> None:
    assert best_ranks([[3, 1, 0], [1, 3]], 5).tolist() == [2, 0, 5, 0, 5]


def test_one_step_of_adagrad() -> None:
    dense = Dense(1, [1.0], rate=0.1)
    dense.learn(0, np.array([[2.0, 1.0]], np.float32), np.array([0.5, -0.2], np.float32))
    slope = 2 * 0.5 - 0.2
    assert dense.weight[0, 0] == pytest.approx(1 - 0.1 * slope / math.sqrt(slope**2 + 1e-3))
    table = Table(1, 3, 2, rate=0.1)
    rows = np.array([2]), np.array([3.0], np.float32)
    table.learn(0, rows, np.array([0.5, -0.5], np.float32))
    step = 0.1 * 1.5 / math.sqrt(1.5**2 + 1e-3)
    assert table.weight[0, :2].any() == np.False_
    assert table.weight[0, 2] == pytest.approx([-step, step])
    assert table.apply(0, rows) == pytest.approx([-3 * step, 3 * step])


def test_the_logistic_starts_at_the_base_rate_and_steps_towards_the_demand() -> None:
    predictor = made("logistic")
    assert_log_odds(predictor.guess(1), *[logit(BASE)] * 4)
    predictor.observe(0, [0])
    predictor.observe(1, [2])
    step = [0.1 * g / math.sqrt(g**2 + 1e-3) for g in (0.25, 0.75)]
    # the row of source expert 0 and the one that is always the case were stepped once each
    down, up = logit(BASE) - 2 * step[0], logit(BASE) + 2 * step[1]
    assert_log_odds(predictor.guess(1), down, down, up, down)


def test_the_combination_starts_as_its_gate_and_learns_whom_to_trust() -> None:
    combined, gate = made("combined", with_gate=True), made("gate", with_gate=True)
    wrong = Hints([[0, 1]])
    assert combined.guess(1, wrong) == pytest.approx(gate.guess(1, wrong))
    for _ in range(60):  # the gate is always wrong, and layer 1 always asks for what it asked for
        for layer in (0, 1):
            combined.observe(layer, [3], wrong)
    assert combined.guess(1, wrong).argmax() == 3
    assert combined.guess(1, wrong)[0] < -2


def test_without_a_gate_each_member_weighs_a_fifth() -> None:
    combined = made("combined")
    assert_log_odds(combined.guess(0), *[0.2 * 6 * logit(BASE)] * 4)


def test_a_map_of_requests_takes_the_most_similar_one() -> None:
    predictor = RequestMap(2, 4, 1)
    for request in ((0, 1), (2, 3)):
        predictor.begin()
        for _ in range(3):
            for layer, expert in enumerate(request):
                predictor.observe(layer, [expert])
    predictor.begin()
    popular = [0.5 / 8, 3.5 / 8, 0.5 / 8, 3.5 / 8]
    assert_log_odds(predictor.guess(1), *(logit(p) for p in popular))
    predictor.observe(0, [2])
    predictor.observe(1, [3])  # like the second request, of 3 tokens
    popular = [0.5 / 9, 3.5 / 9, 0.5 / 9, 4.5 / 9]
    expected = [(n + 2 * p) / 5 for n, p in zip((0, 0, 0, 3), popular, strict=True)]
    assert_log_odds(predictor.guess(1), *(logit(p) for p in expected))
