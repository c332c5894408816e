"""Policy, naive twin and kernel agree bit for bit, event after event, and the bytes follow."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from hotexperts.kernels.gather import GatherLayout
from hotexperts.kernels.gather.naive import fill_bank, gather
from hotexperts.kernels.plan import DEVICE_POLICIES, Counter, PlanLayout
from hotexperts.kernels.plan import naive as naive_plan
from hotexperts.kernels.plan.layout import NUM_COUNTERS, Scalar
from hotexperts.policy import POLICIES
from hotexperts.policy.adv import LRU
from hotexperts.residency import Residency

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"
SHAPES = [  # experts, capacity, tokens, k
    (1, 1, 1, 1),
    (5, 3, 1, 2),
    (8, 8, 3, 2),
    (13, 1, 2, 3),
    (16, 5, 1, 4),
    (33, 12, 4, 4),
    (64, 20, 5, 8),
]
NUM_EVENTS = int(os.environ.get("HOTEXPERTS_PLAN_EVENTS", "40"))


class Layer:
    """The same layer three times: policy and ledger, naive tensors, kernel."""

    def __init__(self, policy: str, num_experts: int, capacity: int, **options: Any) -> None:
        from hotexperts.kernels.plan.launch import PlanGather

        self.policy = POLICIES.load(policy)(num_experts, capacity)
        self.ledger = Residency(num_experts, capacity)
        self.layout = PlanLayout(num_experts, capacity, policy)
        sizes = (80, 4, 24)  # bytes of an expert's tensors: 16-byte multiples and not
        self.gather = GatherLayout.of((0, 256, 512), sizes, 768, capacity)
        rows = torch.arange(num_experts * 192, dtype=torch.int32).view(num_experts, 192)
        self.rows = rows.pin_memory() if DEVICE == "cuda" else rows
        self.naive_state = self.layout.fresh(torch.device("cpu"))
        self.naive_counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64)
        self.naive_buffer = torch.full((self.gather.buffer_words,), -1, dtype=torch.int32)
        buffer = self.naive_buffer.clone().to(DEVICE)
        self.buffer = buffer
        self.kernel = PlanGather(self.layout, self.gather, self.rows, buffer, **options)

    def event(self, ids: torch.Tensor, num_valid: int | None, **how: Any) -> None:
        top_k = ids.shape[-1]
        flat = ids.flatten().tolist()[: None if num_valid is None else num_valid * top_k]
        counts = {e: flat.count(e) for e in sorted(set(flat)) if e >= 0}
        decision = self.policy.decide(
            list(counts), list(counts.values()), self.ledger.residents, self.ledger.num_free, **how
        )
        placements = self.ledger.apply(decision)

        plan = naive_plan.plan(
            self.layout,
            self.naive_state,
            self.naive_counters,
            ids,
            num_valid_ids=None if num_valid is None else num_valid * top_k,
            **how,
        )
        gather(self.gather, self.rows, self.naive_buffer, plan.experts, plan.slots)
        assert plan.experts.tolist() == [p.expert for p in placements]
        assert plan.slots.tolist() == [p.slot for p in placements]
        slot_of = [*self.ledger.slot_of, -1]
        padding = [0] * (ids.numel() - len(flat))
        assert plan.remapped.flatten().tolist() == [slot_of[e] for e in flat] + padding

        on_device = ids.to(DEVICE)
        remapped = torch.full_like(on_device, -7)
        count = None if num_valid is None else torch.tensor([num_valid], dtype=torch.int32)
        count = count if count is None else count.to(DEVICE)
        self.kernel(on_device, remapped, count, **how)
        self.check(plan.remapped, remapped, decision)

    def check(self, expected: torch.Tensor, remapped: torch.Tensor, decision: Any) -> None:
        assert torch.equal(remapped.cpu(), expected)
        end = self.layout.scratch - 1  # one word of padding may lie before the scratch
        assert torch.equal(self.kernel.state[:end].cpu(), self.naive_state[:end])
        assert torch.equal(self.kernel.counters.cpu(), self.naive_counters)
        assert torch.equal(self.buffer.cpu(), self.naive_buffer)
        assert self.layout.view(self.naive_state, "slot_of").tolist() == self.ledger.slot_of
        shadows = self.policy.shadow_hits()
        if shadows is not None:
            played = self.naive_counters[Counter.SHADOW_HITS : Counter.AHEAD].tolist()
            assert played == [*shadows.shadows, shadows.lru]
        passed = self.layout.view(self.naive_state, "passed")
        bypassed = list(decision.bypassed)
        assert (passed >= 0).nonzero().flatten().tolist() == bypassed


def random_ids(draw: random.Random, num_experts: int, num_tokens: int, k: int) -> torch.Tensor:
    popular = [draw.randrange(num_experts) for _ in range(max(1, num_experts // 3))]
    pick = lambda: draw.choice(popular) if draw.random() < 0.6 else draw.randrange(num_experts)  # noqa: E731
    ids = [[-1 if draw.random() < 0.05 else pick() for _ in range(k)] for _ in range(num_tokens)]
    return torch.tensor(ids, dtype=draw.choice([torch.int32, torch.int64]))


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "E{}-C{}-T{}-K{}".format(*s))
@pytest.mark.parametrize("policy", DEVICE_POLICIES)
def test_policy_naive_and_kernel_agree(policy: str, shape: tuple[int, int, int, int]) -> None:
    num_experts, capacity, num_tokens, k = shape
    draw = random.Random(f"{policy}{shape}")
    layer = Layer(policy, num_experts, capacity, num_programs=9, num_warps=4, block_words=64)
    for _ in range(NUM_EVENTS):
        ids = random_ids(draw, num_experts, num_tokens, k)
        num_valid = draw.choice([None, None, num_tokens, draw.randint(0, num_tokens)])
        limit = draw.choice([0, 0, 1, 8])
        layer.event(ids, num_valid, evict=draw.random() > 0.1, max_bypassed=limit)
    assert layer.naive_counters[Counter.CALLS] == NUM_EVENTS


@pytest.mark.interpret
def test_adv_takes_to_lru_alike() -> None:
    """Two lanes scan one row after the other: who turns away misses what the second one needs."""
    layer = Layer("adv", 16, 6, num_programs=9, num_warps=4, block_words=64)
    chosen = set()
    for event in range(NUM_EVENTS):
        ids = [[(2 * event + 4 * lane + i) % 16 for i in range(2)] for lane in range(2)]
        layer.event(torch.tensor(ids), None, max_bypassed=8)
        chosen.add(layer.policy.index)
    assert LRU in chosen
    words = layer.naive_state[Scalar.WORTH : Scalar.REGRET + 1].view(torch.float32).tolist()
    assert words == [*layer.policy.worth.tolist(), *layer.policy.regret.tolist()]


@pytest.mark.interpret
@pytest.mark.parametrize("num_rows", [1, 5, 8])
def test_bank_fills_agree(num_rows: int) -> None:
    """Parts of random events, and rows that the host chose."""
    from hotexperts.kernels.gather.launch import BankFill

    draw = random.Random(num_rows)
    how: dict[str, Any] = {"num_programs": 3, "num_warps": 4, "block_words": 64}
    layer = Layer("lru", 16, 5, num_programs=9, num_warps=4, block_words=64)
    layout = GatherLayout.of((0, 256, 512), (80, 4, 24), 768, num_rows)
    fill = BankFill(layer.kernel, layout, num_rows, layer.rows, **how)
    naive_bank = torch.full((layout.buffer_words,), -1, dtype=torch.int32)
    bank = naive_bank.to(DEVICE, copy=True)
    num_fills = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    fill.warm_up(bank)
    assert torch.equal(bank.cpu(), naive_bank)
    assert not layer.kernel.counters.any()
    for event in range(NUM_EVENTS):
        ids = random_ids(draw, 16, 2, 4)
        layer.event(ids, None, evict=draw.random() < 0.3, max_bypassed=0)
        part, before = draw.randrange(3), layer.kernel.counters[Counter.COPIES].item()
        local = torch.full_like(ids, -7).to(DEVICE)
        row_of = torch.full((16,), -7, dtype=torch.int32, device=DEVICE)
        fill(part, ids.to(DEVICE), local, row_of, bank, num_fills)
        places = layer.layout.view(layer.naive_state, "passed").clone()
        rows = layer.rows.cpu()
        first = part * num_rows
        expected = fill_bank(layout, rows, naive_bank, num_rows, places, ids, first)
        assert torch.equal(local.cpu(), expected[0])
        assert torch.equal(row_of.cpu(), expected[1])
        assert torch.equal(bank.cpu(), naive_bank)
        chosen = torch.full((16,), -1, dtype=torch.int32)
        experts = draw.sample(range(16), draw.randint(0, num_rows))
        chosen[experts] = torch.tensor(draw.sample(range(num_rows), len(experts))).int()
        fill.rows(chosen.to(DEVICE), bank)
        fill_bank(layout, rows, naive_bank, num_rows, chosen, ids, 0)
        assert torch.equal(bank.cpu(), naive_bank)
        num_copied = int((expected[1] >= 0).sum()) + len(experts)
        assert layer.kernel.counters[Counter.COPIES].item() - before == num_copied
        assert num_fills.item() == event + 1
        layer.naive_counters[Counter.COPIES] += num_copied


@pytest.mark.gpu
@pytest.mark.parametrize("policy", DEVICE_POLICIES)
def test_many_events_on_the_gpu(policy: str) -> None:
    """Many warps and programs, thousands of events: races do not show in the interpreter."""
    num_events = int(os.environ.get("HOTEXPERTS_GPU_EVENTS", "2000"))
    for num_experts, capacity, num_tokens, k in ((64, 20, 2, 8), (128, 32, 1, 8), (300, 77, 5, 10)):
        draw = random.Random(f"{policy}{num_experts}")
        batches = [random_ids(draw, num_experts, num_tokens, k).int() for _ in range(200)]
        order = [draw.randrange(len(batches)) for _ in range(num_events)]
        layer = Layer(policy, num_experts, capacity)
        on_device = [ids.to(DEVICE) for ids in batches]
        out = torch.empty(num_events, num_tokens, k, dtype=torch.int32, device=DEVICE)
        for i, index in enumerate(order):
            layer.kernel(on_device[index], out[i])
        found = out.cpu()
        for i, index in enumerate(order):
            flat = batches[index].flatten().tolist()
            counts = {e: flat.count(e) for e in sorted(set(flat)) if e >= 0}
            decision = layer.policy.decide(
                list(counts),
                list(counts.values()),
                layer.ledger.residents,
                layer.ledger.num_free,
                max_bypassed=0,
            )
            layer.ledger.apply(decision)
            slot_of = [*layer.ledger.slot_of, -1]
            assert found[i].flatten().tolist() == [slot_of[e] for e in flat], i
        bytes_of = layer.buffer.cpu()
        expected = layer.naive_buffer
        residents = torch.tensor(sorted(layer.ledger.residents))
        slots = torch.tensor([layer.ledger.slot_of[e] for e in residents.tolist()])
        gather(layer.gather, layer.rows.cpu(), expected, residents, slots)
        assert torch.equal(bytes_of, expected)
