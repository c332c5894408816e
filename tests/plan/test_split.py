"""A model on several GPUs: what each holds and copies, by hand, and what cannot be cut."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import check_plan
from header_checkpoint import CONFIG, save
from hotexperts.cli.main import main
from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.plan.forecast import forecast
from hotexperts.plan.machine import Machine, by_name
from hotexperts.plan.model import ModelFacts
from hotexperts.plan.source import read_facts
from hotexperts.plan.speed import (
    ENGINE_PART_OF_LINK,
    GRAPH_LAYER_MS,
    KERNEL_PART_OF_LINK,
    PART_OF_TFLOPS,
    RANKS_LAYER_MS,
    prefill_ms,
    step,
)
from hotexperts.plan.split import Demand, Split, demand, demand_of, part_of, waves
from hotexperts.simulate import Trace
from hotexperts.sizing import LayerShape

ROW = 768_000
FACTS = ModelFacts(
    "shape",
    layers=(LayerShape(128, 8, ROW),) * 4,
    other_nbytes=1_000_000,
    expert_nbytes=4 * 128 * ROW,
    kv_nbytes_per_token=8192,
    num_layers=4,
    hidden_size=500,
    expert_width=768,
    vocab_size=1000,
    num_heads=32,
    kv_parts=4,
)
MACHINE = Machine("a GPU", 24 << 30, 1000.0, 50.0, 100.0)


def test_tensor_parallel_ranks_have_a_part_of_every_expert() -> None:
    part = part_of(FACTS, Split(4))
    assert part.layers == (LayerShape(128, 8, ROW // 4),) * 4
    assert part.expert_nbytes == FACTS.expert_nbytes // 4
    assert (part.other_nbytes, part.kv_nbytes_per_token) == (250_000, 2048)


def test_expert_parallel_ranks_have_whole_experts() -> None:
    part = part_of(FACTS, Split(8, "ep"))
    assert part.layers == (LayerShape(16, 8, ROW),) * 4
    assert part.expert_nbytes == FACTS.expert_nbytes // 8
    assert part.kv_nbytes_per_token == 2048  # four heads of keys: two ranks have the same one
    uneven = replace(FACTS, layers=(LayerShape(130, 8, ROW),))
    assert part_of(uneven, Split(4, "ep")).layers == (LayerShape(33, 8, ROW),)  # not 32.5


def test_one_gpu_has_everything() -> None:
    assert part_of(FACTS, Split()) == FACTS


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--gpus 12: 32 attention heads .* one of 1, 2, 4, 8$"):
        part_of(FACTS, Split(12))
    blocks = replace(FACTS, expert_width_multiple=128)
    assert part_of(blocks, Split(2)).layers[0].row_nbytes == ROW // 2
    with pytest.raises(ConfigError, match=r"768 columns .* in blocks of 128: give --parallel ep"):
        part_of(blocks, Split(4))
    few = replace(FACTS, layers=(LayerShape(4, 2, ROW),))
    with pytest.raises(ConfigError, match=r"--gpus 8 --parallel ep: a layer has 4 experts"):
        part_of(few, Split(8, "ep"))
    with pytest.raises(ConfigError, match="2 GPUs, 4 on a link"):
        Split(2, gpus_per_link=4)
    with pytest.raises(ConfigError, match="--parallel 'dp': give one of tp, ep"):
        Split(2, "dp")  # type: ignore[arg-type]


def test_demand_is_that_of_the_rank_with_the_most() -> None:
    """Experts 0 and 1 are rank 0's, 2 and 3 rank 1's; each has one slot."""
    ids = np.array([[0, 1], [2, 3], [0, 2], [0, 1], [0, 3]])[:, None]
    trace = Trace(ids, np.ones(5, np.int32), np.zeros(5, np.int32), {"n_experts": 4})
    # Asked of rank 0: 2 0 1 2 1, of rank 1: 0 2 1 0 1; the most: 2 2 1 2 1.
    assert demand_of(trace, 2, 1, 2) == Demand(8 / 5, 0.0, 0.0)
    # One slot of two: in the steps 2, 3 and 4 each rank misses at least one of both in step 3.
    found = demand_of(trace, 1, 1, 2)
    assert found.demanded == 8 / 5
    assert 1 / 5 <= found.missed <= 4 / 5
    assert found.mean_missed < found.missed


def test_two_ranks_of_equal_halves_miss_what_one_does() -> None:
    """Rank 1 is asked for what rank 0 is asked for, at the same time: twice the bytes in sum."""
    generator = np.random.default_rng(0)
    half = np.stack([generator.permutation(8)[:2] for _ in range(60)])
    ids = np.concatenate([half, half + 8], axis=1)[:, None]
    phase, seq = np.ones(60, np.int32), np.zeros(60, np.int32)
    both = demand_of(Trace(ids, phase, seq, {"n_experts": 16}), 4, 1, 2)
    alone = demand_of(Trace(half[:, None], phase, seq, {"n_experts": 8}), 4, 1, 1)
    assert both == alone
    assert both.missed == both.mean_missed > 0


def test_busy_ranks_are_above_the_mean() -> None:
    found = demand(64, 8, 8, 1, 4)
    assert 2 < found.demanded < 8  # of 8, two on average
    assert found.mean_missed < found.missed < found.demanded


@pytest.mark.parametrize(
    ("shape", "capacity", "batch", "expected"),
    [
        (LayerShape(128, 8, ROW), 32, 1, (1, 1)),
        (LayerShape(128, 8, ROW), 32, 8, (5, 6)),  # 64 ids, 32 slots, 8 rows: 1 + 32 / 8
        (LayerShape(128, 8, ROW), 32, 32, (13, 13)),  # all 96 absent ones, nobody more
        (LayerShape(128, 8, ROW), 128, 32, (1, 1)),
        (LayerShape(16, 8, ROW), 4, 1, (2, 2)),  # 8 ids may be this rank's: 4 slots, 4 rows
    ],
)
def test_waves_follow_from_shapes(
    shape: LayerShape, capacity: int, batch: int, expected: tuple[int, int]
) -> None:
    assert waves(shape, capacity, batch) == expected


def test_a_step_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 layers; experts of 0.768 MB; link 50 GB/s; memory 1000 GB/s."""
    asked = {1: Demand(8.0, 2.0, 2.0), 2: Demand(6.0, 2.0, 1.5)}
    monkeypatch.setattr(
        "hotexperts.plan.speed.demand", lambda e, k, capacity, batch, ranks: asked[ranks]
    )
    half, whole = 4 * ROW / 2, 4 * ROW  # bytes of an expert in every layer
    tensor = step(FACTS, MACHINE, 32, 1, 0, Split(2))
    assert tensor.missed_gb[1] == pytest.approx(2 * half / 1e9)
    assert tensor.copy_ms[1] == pytest.approx(2 * half / 50e6 / KERNEL_PART_OF_LINK)
    resident = (500_000 + 8 * half) / 1e9 + (GRAPH_LAYER_MS + RANKS_LAYER_MS["tp"]) * 4
    assert tensor.ms[1] == pytest.approx(resident + tensor.copy_ms[1])
    expert = step(FACTS, MACHINE, 16, 1, 0, Split(2, "ep"))
    assert expert.missed_gb[1] == pytest.approx(2 * whole / 1e9)
    assert expert.copy_ms[1] == pytest.approx(2 * whole / 50e6 / KERNEL_PART_OF_LINK)
    resident = (500_000 + 6 * whole) / 1e9 + (GRAPH_LAYER_MS + RANKS_LAYER_MS["ep"]) * 4
    assert expert.ms[1] == pytest.approx(resident + expert.copy_ms[1])
    # On one link: twice a rank's bytes; with whole experts all that both miss, 3 of them.
    assert step(FACTS, MACHINE, 32, 1, 0, Split(2, "tp", 2)).copy_ms[1] == pytest.approx(
        2 * 2 * half / 50e6 / KERNEL_PART_OF_LINK
    )
    assert step(FACTS, MACHINE, 16, 1, 0, Split(2, "ep", 2)).copy_ms[1] == pytest.approx(
        3 * whole / 50e6 / KERNEL_PART_OF_LINK
    )


def test_more_gpus_have_room_for_more() -> None:
    budget = {"budget_nbytes": 1_400_000_000, "ram_nbytes": None, "context": 1024, "batch": 1}
    one, two = (forecast(FACTS, MACHINE, split=Split(n), **budget) for n in (1, 2))  # type: ignore[arg-type]
    assert one.capacity < two.capacity
    assert two.host_nbytes == one.host_nbytes == FACTS.expert_nbytes
    assert two.gpu_nbytes["other weights"] == 500_000
    assert two.gpu_nbytes["slots"] == two.capacity * 4 * ROW // 2
    assert two.prefill_tokens_per_s[1] > one.prefill_tokens_per_s[1]


def test_a_rank_has_all_tokens_and_its_part_of_an_expert() -> None:
    """Of pairs 4 x 2048 tokens x 8 experts x the wider of 500 and twice its part x 2 bytes."""
    budget = {"budget_nbytes": 4 << 30, "ram_nbytes": None, "context": 1024, "batch": 1}
    rest = 8 * 2048 * 500 * 2 + 4 * 1000 * 4
    for split, width in ((Split(), 1536), (Split(2), 768), (Split(2, "ep"), 1536)):
        found = forecast(FACTS, MACHINE, split=split, **budget)  # type: ignore[arg-type]
        assert found.gpu_nbytes["workspace of 2048 tokens"] == 4 * 2048 * 8 * width * 2 + rest
        assert sum(found.gpu_nbytes.values()) <= 4 << 30
        assert (found.loop_tokens_per_s is None) == (split.num_gpus > 1)


def test_a_prefill_of_two_ranks() -> None:
    """So many tokens that multiplying takes longer than reading."""
    num_tokens = 10**6
    flops = num_tokens * 2 * (4 * 8 * 3 * 500 * 768 + FACTS.other_nbytes / 2)
    compute_ms = 1e3 * flops / 2 / (PART_OF_TFLOPS * 100e12)
    tensor_nbytes, expert_nbytes = 4 * (128 - 32) * ROW / 2, 4 * (64 - 16) * ROW
    assert tensor_nbytes == expert_nbytes
    for split, capacity in ((Split(2), 32), (Split(2, "ep"), 16), (Split(2, "tp", 2), 32)):
        stream_ms = split.gpus_per_link * tensor_nbytes / (ENGINE_PART_OF_LINK * 50e6)
        worst, best = prefill_ms(FACTS, MACHINE, capacity, num_tokens, split)
        assert best == pytest.approx(stream_ms)
        assert worst == pytest.approx(stream_ms + compute_ms)


def test_the_worst_end_goes_by_the_part_of_experts_that_a_rank_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 slots are an eighth of all experts, and a quarter of those of one of two ranks."""
    monkeypatch.setattr("hotexperts.plan.speed.demand", lambda *_: Demand(8.0, 2.0, 2.0))
    for split, times in ((Split(2), 1 + 3.5 / 8), (Split(2, "ep"), 1 + 3.5 / 4)):
        worst, best = step(FACTS, MACHINE, 16, 1, 0, split).missed_gb
        assert worst / best == pytest.approx(times)


def test_facts_say_how_a_model_can_be_cut(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path))
    assert (facts.num_heads, facts.kv_parts, facts.expert_width) == (8, 2, 64)
    blocks = {"quantization_config": {"weight_block_size": [128, 64]}, "kv_lora_rank": 512}
    facts = read_facts(save(tmp_path, {**CONFIG, **blocks, "moe_intermediate_size": 96}))
    assert (facts.kv_parts, facts.expert_width, facts.expert_width_multiple) == (1, 96, 128)
    broken = {"quantization_config": {"weight_block_size": ["a"]}}
    with pytest.raises(CheckpointError, match="weight_block_size is"):
        read_facts(save(tmp_path, {**CONFIG, **broken}))


def test_the_command_for_two_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save(tmp_path))
    two = ["plan", folder, "--gpu", "RTX 4060", "--vram", "2GiB", "--gpus", "2"]
    assert main(two) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--tensor-parallel-size 2" in out
    assert "--enable-expert-parallel" not in out
    assert "hotexperts run" not in out
    assert "2, a part of every expert: 732 MiB of experts each, its own link" in out
    assert "whole experts: " in out
    assert main([*two, "--parallel", "ep", "--gpus-per-link", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["split"] == {"num_gpus": 2, "parallel": "ep", "gpus_per_link": 2}
    assert data["commands"][0].endswith("--tensor-parallel-size 2 --enable-expert-parallel")
    assert data["capacity"] <= 32
    for arguments, message in (
        (["--gpus", "3"], "8 attention heads cannot be divided"),
        (["--gpus", "1", "--parallel", "ep"], "--parallel ep is for several GPUs"),
        (["--parallel", "up"], "--parallel 'up': give one of tp, ep"),
        (["--gpus-per-link", "4"], "2 GPUs, 4 on a link"),
    ):
        assert main([*two, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_several_sizes_of_two_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = ["plan", str(save(tmp_path)), "--vram", "1GiB,2GiB", "--gpus", "2", "--parallel", "ep"]
    assert main(two) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 GPUs, whole experts each" in out
    assert "32 of 32" in out
    assert "Transformers" not in out
    assert main([*two, "--json"]) == 0
    small, large = json.loads(capsys.readouterr().out)
    assert small["split"] == large["split"]
    assert large["loop_tokens_per_s"] is None
    assert large["commands"][0].endswith("--tensor-parallel-size 2 --enable-expert-parallel")


def test_forecasts_for_two_gpus_are_compared_with_measurements() -> None:
    results = json.loads((check_plan.RESULTS / "vllm-decode.json").read_text())
    runs = {"25.0% of slots, batch 1": {"ms": 1000.0, "slots": 32}, "stalls alone": {}}
    more = {"link_gb_s": {"together": 50.0}, "cases": {"one": {"runs": runs}, "tp": {"runs": runs}}}
    (row,) = check_plan.compare_ranks(results | more)
    assert row.name == "two-gpu: tp, 25.0% of slots, batch 1"
    facts = check_plan.qwen3(results["shape"])
    machine = by_name("H200")._replace(link_gb_s=50.0)
    kv = 200 * facts.kv_nbytes_per_token // 2  # tokens
    packed = check_plan.PACKED_PART  # the default's rows
    assert row.forecast == step(facts, machine, 32, 1, kv, Split(2), packed_part=packed).ms
    assert row.outside == pytest.approx(1000 / row.forecast[0] - 1)
