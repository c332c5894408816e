"""Shapes as models, and what decodes them, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hotexperts.bench.decode import Decoder
from hotexperts.bench.random_model import random_model
from hotexperts.bench.replay import Replay
from hotexperts.bench.routing import Routing
from hotexperts.bench.shapes import SHAPES, Shape
from hotexperts.bench.sources import CheckpointSource, ShapeSource
from hotexperts.errors import HostMemoryError
from hotexperts.integrations.transformers.recording import RoutingRecorder
from hotexperts.transformers import attach

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
SMALL |= {"intermediate_size": 16, "num_hidden_layers": 3, "max_position_embeddings": 64}
MORE = {
    "qwen3_moe": {"moe_intermediate_size": 16, "head_dim": 8, "num_experts": 8},
    "olmoe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "deepseek_v2": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}


def tiny(name: str) -> Shape:
    """The shape of that name, everything small."""
    shape = SHAPES[name]
    sizes = {**shape.sizes, **SMALL, **MORE[shape.model_type], "num_experts_per_tok": 2}
    return replace(shape, sizes=sizes, num_experts=8, top_k=2)


def drawn(num_layers: int = 2) -> np.ndarray[Any, Any]:
    """Routing of 3 sequences of 12 positions, `[sequence, position, layer, k]`."""
    order = np.random.default_rng(1).random((3, 12, num_layers, 8)).argsort(axis=3)
    return order[..., :2]


@pytest.mark.parametrize("name", SHAPES)
def test_layers_of_a_kind_are_equal_and_the_output_is_finite(name: str) -> None:
    shape = tiny(name)
    model = random_model(shape, "cpu")
    *dense, first, second = model.model.layers
    assert len(dense) == 1
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr(), "each layer has weights of its own"
    assert hasattr(dense[0].mlp, "experts") == (shape.num_dense == 0)
    logits = model(torch.arange(6).unsqueeze(0)).logits
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_a_shape_that_does_not_fit_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotexperts.bench.random_model.available_host_bytes", lambda: 1000)
    with pytest.raises(HostMemoryError, match=r"give fewer --layers, or free memory"):
        random_model(tiny("OLMoE-1B-7B"), "cpu")


@pytest.mark.parametrize("name", SHAPES)
def test_routers_repeat_the_ids(name: str) -> None:
    model = attach(random_model(tiny(name), "cpu"), expert_cache_size=4, device="cpu")
    ids = drawn()
    replay = Replay(ids, model, "cpu", 12)
    replay.show_rows([1], 2, 5)
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(torch.arange(5).unsqueeze(0))
    recorded = recorder.take()
    assert recorded is not None
    for layer in range(recorded.ids.shape[1]):
        assert (recorded.ids[:, layer] == ids[1, 2:7, layer % 2]).all()


def test_rows_of_a_batch_repeat_their_own_sequences() -> None:
    model = random_model(tiny("OLMoE-1B-7B"), "cpu")
    ids = drawn()
    replay = Replay(ids, model, "cpu", 24)
    replay.show_rows([2, 0], 3, 2)
    _, weights, found = model.model.layers[1].mlp.gate(torch.zeros(2, 2, 32))
    assert found.tolist() == [*ids[2, 3:5, 1].tolist(), *ids[0, 3:5, 1].tolist()]
    assert weights.unique().tolist() == [0.5]


def test_a_cached_shape_decodes_the_resident_tokens_and_counts_each_step() -> None:
    source = ShapeSource(
        tiny("OLMoE-1B-7B"), "cpu", Routing(drawn(), "drawn"), 2, {"policy": "lru"}
    )
    taken = []
    for model in (source.resident(), source.cached("4", 64)):
        model.set_experts_implementation("grouped_mm") if not taken else None
        decoder = Decoder(model, batch=2, max_positions=12, uses_graph=False)
        (first, second) = source.groups(model, 2, 4)
        assert first.name == "sequences 0 to 1"
        taken.append([decoder.sequence(g.prompt, g.show, 6) for g in (first, second)])
    resident, cached = taken
    assert [len(t.step_ms) for t in cached] == [6, 6]
    assert [t.last_tokens for t in cached] == [t.last_tokens for t in resident]
    assert resident[0].decode.demands == 0
    ids = drawn()
    # 3 layers, 6 steps; of each step the distinct experts of both rows
    asked = sum(
        len(np.unique(ids[[0, 1], 4 + step, layer % 2])) for step in range(6) for layer in range(3)
    )
    assert cached[0].decode.demands == asked
    assert cached[0].prefill.demands == sum(
        len(np.unique(ids[[0, 1], :4, layer % 2])) for layer in range(3)
    )
    assert cached[0].decode.bytes_moved > 0


def test_each_call_is_shown_first() -> None:
    model = random_model(tiny("OLMoE-1B-7B"), "cpu")
    shown: list[tuple[int, int]] = []
    counted: list[int] = []
    decoder = Decoder(model, batch=2, max_positions=12, uses_graph=False, for_tokens=counted.append)
    decoder.sequence(torch.arange(4).repeat(2, 1), lambda *call: shown.append(call), 3)
    assert shown == [(0, 4), (4, 1), (5, 1), (6, 1)]
    assert counted == [8, 2], "tokens of the prefill, then of each step"


def test_rows_read_the_text_from_different_places() -> None:
    source = CheckpointSource("", {"a": range(10), "b": [7]}, {"device": "cpu"})
    first, second = source.groups(None, 2, 4)
    assert (first.name, first.prompt.tolist()) == ("a", [[0, 1, 2, 3], [5, 6, 7, 8]])
    assert second.prompt.tolist() == [[7] * 4] * 2
    (longer, _) = source.groups(None, 1, 12)
    assert longer.prompt.tolist() == [[*range(10), 0, 1]]
