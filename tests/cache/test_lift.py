"""The lift table against its specification, call by call."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hotexperts.cache import lift
from hotexperts.cache.lift import LiftTable
from hotexperts.predict import popularity
from hotexperts.predict.cross_lift import CrossLift
from hotexperts.sizing import lift_nbytes
from simulate.test_recorded import QWEN, needs_traces, recorded

E, K = 24, 3


def made(num_experts: int = E, top_k: int = K) -> tuple[LiftTable, CrossLift]:
    return LiftTable(num_experts, num_experts, top_k, "cpu"), CrossLift(2, num_experts, top_k)


def test_a_table_takes_what_a_budget_counts() -> None:
    for before, after in ((24, 24), (7, 12)):
        assert LiftTable(before, after, K, "cpu").nbytes == lift_nbytes(before, after)
    assert lift_nbytes(7, 12) == 4 * (8 * 13 + 9 * 12)


def drawn(num_tokens: int, seed: int, num_experts: int = E, top_k: int = K) -> torch.Tensor:
    """Ids `[T, 2, K]` of two layers; what the first asks for says much about the second."""
    draw = random.Random(seed)
    found = []
    for _ in range(num_tokens):
        topic = draw.randrange(4) * num_experts // 4
        near = [(topic + n) % num_experts for n in range(num_experts // 3)]
        found.append(
            [draw.sample(near, top_k), draw.sample([(3 * e) % num_experts for e in near], top_k)]
        )
    return torch.tensor(found)


def told(table: LiftTable, spec: CrossLift, before: Any, after: Any) -> None:
    """One token, to both."""
    spec.observe(0, before.tolist())
    spec.observe(1, after.tolist())
    table.learn(before[None].int(), after[None].int())


def exact(spec: CrossLift, origin: Sequence[int]) -> np.ndarray:
    """The specification's formula on its own counts, in double precision."""
    together, num_from = spec.together[1].astype(float), spec.num_from[1].astype(float)
    chance = (spec.count[1].astype(float) + 2 * spec.base) / (float(spec.num_calls[1]) + 2)
    given = (together[origin] + 2 * chance) / (num_from[origin][:, None] + 2)
    return np.log(chance / (1 - chance)) + np.log(given / chance).sum(0)


def assert_same_guesses(table: LiftTable, spec: CrossLift, origin: torch.Tensor) -> None:
    """As scores, and as a ranking: only experts that are as likely may change places."""
    spec.observe(0, origin.tolist())
    expected, found = spec.guess(1), table.scores(origin[None])[0]
    assert found.numpy() == pytest.approx(expected, abs=2e-4)
    order = found.argsort(descending=True, stable=True).tolist()
    known = exact(spec, origin.tolist())[order]
    assert (known[:-1] >= np.maximum.accumulate(known[::-1])[::-1][1:] - 2e-4).all()


@pytest.mark.parametrize("seed", range(3))
def test_guesses_are_the_specifications(seed: int) -> None:
    table, spec = made()
    for before, after in drawn(300, seed):
        assert_same_guesses(table, spec, before)
        told(table, spec, before, after)
    assert table.counts[-1, -1] == 300
    assert torch.equal(table.counts[:-1, :-1], torch.from_numpy(spec.together[1]))


@needs_traces
def test_guesses_are_the_specifications_on_recorded_routing() -> None:
    """Better than popularity's, or the table would be of no use."""
    ids = torch.from_numpy(recorded(QWEN).ids[:400, 10:12].astype(np.int64))
    table, spec = made(128, ids.shape[-1])
    right = popular = 0
    for before, after in ids:
        assert_same_guesses(table, spec, before)
        nobody = torch.full_like(before[None], -1)
        right += hits(table.scores(before[None]), after)
        popular += hits(table.scores(nobody), after)
        told(table, spec, before, after)
    assert right > 1.3 * popular > 0


def hits(scores: torch.Tensor, demand: torch.Tensor) -> int:
    return int(torch.isin(scores[0].topk(len(demand)).indices, demand).sum())


def test_experts_that_are_as_likely_have_the_same_score() -> None:
    """Bit for bit, so that the lower id comes first, as in the specification."""
    table, spec = made()
    assert table.scores(torch.tensor([[0, 1, 2]])).unique().numel() == 1
    told(table, spec, torch.tensor([0, 1, 2]), torch.tensor([5, 9, 20]))
    told(table, spec, torch.tensor([0, 1, 3]), torch.tensor([5, 11, 20]))
    scores = table.scores(torch.tensor([[0, 1, 2]]))[0]
    assert scores[5] == scores[20] == scores.max()
    rest = torch.ones(E, dtype=torch.bool)
    rest[[5, 9, 11, 20]] = False
    assert scores[rest].unique().numel() == 1
    assert scores.argsort(descending=True, stable=True)[:2].tolist() == [5, 20]
    assert np.argsort(-spec.guess(1), kind="stable")[:2].tolist() == [5, 20]


def test_a_batch_and_a_prefill_count_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of at most so many tokens; the guess of each is its own."""
    monkeypatch.setattr(lift, "MOST_TOKENS", 8)
    together, one_by_one = made()[0], made()[0]
    ids = drawn(21, seed=5)
    together.learn(ids[:, 0], ids[:, 1])
    for before, after in ids:
        one_by_one.learn(before[None], after[None])
    assert torch.equal(together.counts, one_by_one.counts)
    assert torch.equal(together.rows, one_by_one.rows)
    scores = together.scores(ids[:, 0])
    assert torch.equal(scores, torch.cat([together.scores(before[None]) for before, _ in ids]))


def test_padding_and_nobody_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lift, "MOST_TOKENS", 4)
    padded, plain, ids = made()[0], made()[0], drawn(11, seed=6)
    ids[2] = -1
    ids[4, 0, 1] = -1
    padded.learn(ids[:, 0], ids[:, 1], torch.tensor([6], dtype=torch.int32))
    for token in (0, 1, 3, 5):
        plain.learn(ids[token : token + 1, 0], ids[token : token + 1, 1])
    plain.learn(ids[4:5, 0, [0, 2]], ids[4:5, 1])
    assert torch.equal(padded.counts, plain.counts)
    assert padded.counts[-1, -1] == 5
    part = padded.scores(ids[4:5, 0])
    assert torch.allclose(part, padded.scores(ids[4:5, 0, [0, 2]]), atol=1e-6)


def test_ids_of_no_expert_read_nothing_beyond_the_table() -> None:
    table = LiftTable(4, 6, 2, "cpu")
    wanted = table.scores(torch.tensor([[1, -1]]))
    found = table.scores(torch.tensor([[1, 1000], [1, -7]]))
    assert torch.equal(found, wanted.expand(2, -1))


def test_counts_are_halved_before_float32_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(popularity, "MOST_CALLS", 16.0)
    table, spec = made()
    for before, after in drawn(100, seed=7):
        assert_same_guesses(table, spec, before)
        told(table, spec, before, after)
    assert 8 <= table.counts[-1, -1] == spec.num_calls[1] < 16


def test_a_cleared_table_is_a_new_one() -> None:
    table, spec = made()
    for before, after in drawn(9, seed=8):
        told(table, spec, before, after)
    table.expect(torch.zeros(1, K))
    table.clear()
    assert torch.equal(table.rows, made()[0].rows)
    assert not table.counts.any()
    assert table.take() is None


def test_what_is_kept_is_taken_once() -> None:
    table, ids = made()[0], drawn(2, seed=9)[:, 0]
    table.expect(ids)
    assert table.take() is ids
    assert table.take() is None


def test_one_made_in_inference_mode_may_be_written_outside() -> None:
    with torch.inference_mode():
        table = made()[0]
    table.learn(torch.tensor([[1]]), torch.tensor([[2]]))
    with torch.inference_mode():
        table.learn(torch.tensor([[1]]), torch.tensor([[2]]))
    table.clear()
    assert not table.counts.any()


@pytest.mark.parametrize("method", ["scores", "learn"])
def test_each_step_is_one_graph_of_fixed_addresses(method: str) -> None:
    """Nothing that a shape or the host depends on: `fullgraph` breaks there."""
    table, plain = made()[0], made()[0]
    ids, valid = drawn(5, seed=10), torch.tensor([3], dtype=torch.int32)
    given = (ids[:, 0],) if method == "scores" else (ids[:, 0], ids[:, 1], valid)
    compiled: Callable[..., Any] = torch.compile(
        getattr(table, method), fullgraph=True, backend="eager", dynamic=False
    )
    where = table.counts.data_ptr(), table.rows.data_ptr()
    found, expected = compiled(*given), getattr(plain, method)(*given)
    assert (table.counts.data_ptr(), table.rows.data_ptr()) == where
    assert torch.equal(table.counts, plain.counts)
    assert torch.equal(table.rows, plain.rows)
    if method == "scores":
        assert torch.equal(found, expected)
    else:
        assert table.counts[-1, -1] == 3


def test_layers_may_differ_in_their_experts_and_in_how_many_a_token_asks_for() -> None:
    table = LiftTable(6, 4, 1, "cpu")
    for _ in range(20):
        table.learn(torch.tensor([[5, 0], [1, 2]]), torch.tensor([[3], [0]]))
    assert table.counts[5].tolist() == [0, 0, 0, 20, 20]
    assert table.counts[-1].tolist() == [20, 0, 0, 20, 40]
    scores = table.scores(torch.tensor([[0, 5], [2, 1]]))
    assert scores.shape == (2, 4)
    assert scores.argmax(1).tolist() == [3, 0]


def test_its_memory_is_two_tables() -> None:
    table = LiftTable(128, 64, 8, "cpu")
    assert table.nbytes == 4 * (129 * 65 + 130 * 64)
