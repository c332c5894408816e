"""Equal decisions on all ranks: fingerprints, and a check of two ranks in one process."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotexperts.cache import CachedWeightProvider, CPUBackingStore
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.errors import ConfigError, RanksDifferError
from hotexperts.integrations.vllm import options, ranks, refusals
from hotexperts.integrations.vllm.ranks import RankCheck, fingerprint

pytest.importorskip("triton")
E = 8
CPU = torch.device("cpu")


def make(kind: Any) -> Any:
    store = CPUBackingStore.from_tensors({"w13_weight": torch.randn(E, 4, 4)}, pin=False)
    return kind(store, 3, policy="lru", device="cpu")


def ask(provider: Any, *ids: int) -> Any:
    provider.prepare(torch.tensor([ids], dtype=torch.int32))
    return provider


@pytest.mark.interpret
@pytest.mark.parametrize("kind", [DeviceWeightProvider, CachedWeightProvider])
def test_a_fingerprint_follows_from_the_ids_alone(kind: Any) -> None:
    """The weights differ from rank to rank, the decisions may not."""
    first, second = make(kind), make(kind)
    for ids in ((1, 2), (3, 1), (5, 3)):
        assert fingerprint(ask(first, *ids)) == fingerprint(ask(second, *ids))
    before = fingerprint(first)
    assert fingerprint(ask(first, 5, 3)) != before  # counted, though nobody moved
    assert fingerprint(ask(second, 5, 1)) != fingerprint(first)


@pytest.mark.interpret
def test_words_that_change_places_are_seen() -> None:
    provider = ask(make(DeviceWeightProvider), 1, 2)
    before = fingerprint(provider)
    words = provider.plan.view(provider.kernel.state, "slot_of")
    words[[1, 2]] = words[[2, 1]].clone()
    assert fingerprint(provider) != before


@pytest.mark.interpret
@pytest.mark.parametrize("kind", [DeviceWeightProvider, CachedWeightProvider])
def test_a_rank_that_decides_otherwise_is_named(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's part of the collective is given by hand."""
    mine, others = [make(kind), make(kind)], [make(kind), make(kind)]

    def all_reduce(extremes: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        theirs = torch.stack([fingerprint(provider) for provider in others])
        extremes.copy_(torch.maximum(extremes, torch.stack([theirs, ~theirs])))

    monkeypatch.setattr(
        ranks, "dist", SimpleNamespace(all_reduce=all_reduce, ReduceOp=ranks.dist.ReduceOp)
    )
    check = RankCheck(["a", "b"], CPU, group=None)
    for provider in mine + others:
        ask(provider, 1, 2)
    check.after_step(mine)
    ask(others[1], 1, 2)
    with pytest.raises(RanksDifferError, match=r"decided differently in b: .*check_ranks"):
        check.after_step(mine)
    ask(mine[1], 1, 2)  # alike again, but what was computed in between is not
    with pytest.raises(RanksDifferError):
        check.after_step(mine)


@pytest.mark.parametrize(("tensor_parallel", "is_expert_parallel"), [(1, False), (2, True)])
def test_a_check_that_has_nothing_to_compare_is_refused(
    tensor_parallel: int, is_expert_parallel: bool
) -> None:
    wanted = options.parse({"size": 4, "options": {"check_ranks": True}})
    parallel = SimpleNamespace(
        tensor_parallel_size=tensor_parallel, enable_expert_parallel=is_expert_parallel
    )
    with pytest.raises(ConfigError, match=r"check_ranks compares ranks.*without --enable-expert"):
        refusals._check_ranks(SimpleNamespace(parallel_config=parallel), wanted)
    parallel.tensor_parallel_size, parallel.enable_expert_parallel = 2, False
    refusals._check_ranks(SimpleNamespace(parallel_config=parallel), wanted)


@pytest.mark.parametrize(("world_size", "expected"), [(1, 5), (2, 7)])
def test_a_budget_is_that_of_the_fullest_rank(
    world_size: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has 7."""
    group = SimpleNamespace(world_size=world_size, cpu_group="cpu")

    def all_reduce(value: torch.Tensor, op: Any, group: str) -> None:
        assert (op, group) == ("max", "cpu")
        value.copy_(max(value, torch.tensor(7)))

    name = "vllm.distributed.parallel_state"
    state = SimpleNamespace(get_tp_group=lambda: group)
    for part in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, part, SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, state)
    reduce_op = SimpleNamespace(MAX="max")
    monkeypatch.setattr(ranks, "dist", SimpleNamespace(all_reduce=all_reduce, ReduceOp=reduce_op))
    assert ranks.largest_of_ranks(5) == expected


@pytest.mark.parametrize("is_alike", [True, False])
def test_ranks_are_asked_whether_they_hold_the_same(
    is_alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = make(CachedWeightProvider), make(CachedWeightProvider)
    ask(mine, 1)
    ask(other, 1 if is_alike else 2)
    group = SimpleNamespace(world_size=2, cpu_group="cpu")

    def all_reduce(extremes: torch.Tensor, op: Any, group: str) -> None:
        assert group == "cpu"
        theirs = fingerprint(other).view(1)
        extremes.copy_(torch.maximum(extremes, torch.stack([theirs, ~theirs])))

    state = SimpleNamespace(get_tp_group=lambda: group)
    for part in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, part, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    reduce_op = SimpleNamespace(MAX="max")
    monkeypatch.setattr(ranks, "dist", SimpleNamespace(all_reduce=all_reduce, ReduceOp=reduce_op))
    assert ranks.same_on_all_ranks([mine]) == is_alike
    group.world_size = 1
    assert ranks.same_on_all_ranks([mine])
