"""What is asked of vLLM for a shape, and what is found to be the same; without vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hotexperts.bench.shapes import VLLM_SHAPES, find_shape
from hotexperts.bench.vllm import options
from hotexperts.errors import ConfigError

ASKED = options.Asked(
    shape=VLLM_SHAPES["gpt-oss-20b"],
    sizes=[16, 8],
    batches=[8, 1],
    prompt_tokens=128,
    steps=64,
    num_groups=4,
    has_resident=True,
    policy="lru",
    packing="none",
    check_host_memory=False,
)


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt-oss-20b", 20.91), ("gpt-oss-120b", 116.83)], ids=lambda v: str(v)
)
def test_shapes_have_the_parameters_of_their_models(name: str, billions: float) -> None:
    sizes: Any = VLLM_SHAPES[name].sizes
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"] * sizes["head_dim"]
    kv_heads = sizes["num_key_value_heads"] * sizes["head_dim"]
    attention = 2 * hidden * heads + 2 * hidden * kv_heads + heads + 2 * kv_heads + hidden
    experts = sizes["num_experts"] * 3 * (hidden + 1) * sizes["intermediate_size"]
    layer = attention + sizes["num_attention_heads"] + experts + sizes["num_experts"] * (hidden + 1)
    total = sizes["num_hidden_layers"] * layer + 2 * sizes["vocab_size"] * hidden
    assert total / 1e9 == pytest.approx(billions, abs=0.01)


def test_fewer_layers_keep_their_kinds() -> None:
    _, cut = find_shape("GPT-OSS-20B", 3)
    assert cut.sizes["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert cut.quantization == "mxfp4"
    assert cut.is_of_vllm
    assert not find_shape("OLMoE-1B-7B", 3)[1].is_of_vllm


def test_the_engine_begins_with_the_fewest_slots_and_times_each_step() -> None:
    found = options.engine_options(ASKED, is_gpu=True)
    assert found["moe_expert_cache_size"] == 8
    assert found["moe_expert_cache_policy"] == "lru"
    more = {"packing": "none", "check_host_memory": False, "self_test": True}
    assert found["moe_expert_cache_options"] == more
    assert found["async_scheduling"] is False
    assert (found["max_model_len"], found["max_num_seqs"]) == (193, 8)
    assert found["max_num_batched_tokens"] == 8 * 128, "a batch's prompts are one step"
    assert found["compilation_config"]["cudagraph_capture_sizes"] == [1, 8]
    of_a_token = 24 * 8 * 64 * 2 * 2
    assert found["kv_cache_memory_bytes"] == max(1 << 28, 2 * 8 * (193 + 64) * of_a_token)
    on_cpu = options.engine_options(ASKED, is_gpu=False)
    assert on_cpu["enforce_eager"] is True
    assert "compilation_config" not in on_cpu


def test_slots_alone_are_taken() -> None:
    shape = VLLM_SHAPES["gpt-oss-20b"]
    assert options.slots((), shape) == [8, 16]
    assert options.slots(("4", "32"), shape) == [4, 32]
    for size in ("auto", "6GiB", "33"):
        with pytest.raises(ConfigError, match=rf"--expert-cache-size {size}: .*give 1 to 32"):
            options.slots((size,), shape)


def test_where_vllm_or_a_gpu_is_missing_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    shape = ASKED.shape
    monkeypatch.setattr("hotexperts.known_versions.installed", lambda *names: None)
    with pytest.raises(ConfigError, match=r"vLLM, which is not installed .*: install it there"):
        options.check_can_run(shape, "gpt-oss-20b")
    monkeypatch.setattr("hotexperts.known_versions.installed", lambda *names: "0.26.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"vLLM's mxfp4 needs a CUDA device: run it where"):
        options.check_can_run(shape, "gpt-oss-20b")
    options.check_can_run(replace(shape, quantization=None), "x")


@pytest.mark.transformers
def test_the_likeliest_tokens_are_compared_until_the_texts_part() -> None:
    pytest.importorskip("torch")
    from hotexperts.bench.vllm.decode import verified

    expected = [([7, 8, 9], [-1.0, -2.0, -3.0])]
    assert verified(expected, expected, 0.0)["verified"] is True
    assert verified([], [], 0.0) == {"verified": None, "first_difference": None}
    near = [([7, 5, 1], [-1.0, -2.1, -9.0])]  # two were nearly as likely, then another text
    found = verified(near, expected, 0.3)
    assert found["verified"] is True
    assert found["largest_difference"] == pytest.approx(0.1)
    found = verified(near, expected, 0.0)
    assert found["first_difference"] == {
        "position": 1,
        "where": "row 0: a log probability of -2.1 instead of -2",
    }
    far = [([7, 8, 9], [-1.0, -2.0, -3.5])]
    assert verified(far, expected, 0.3)["first_difference"]["position"] == 2
    other = [([7, 5, 1], [-1.0, -2.0, -9.0])]  # another token, as likely
    assert verified(other, expected, 0.0)["verified"] is False
