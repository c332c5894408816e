"""Transformers' own ways to decode fast, with a device-managed cache: graphs, batching, no sync."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hotexperts.transformers as hot
from hotexperts.demo import demo_model_path

pytest.importorskip("triton")
pytestmark = [pytest.mark.transformers, pytest.mark.gpu]
PROMPT = "def read_file(path):"


def load(mode: str, size: int = 6) -> tuple[Any, torch.Tensor]:
    """The model inside, resident or cached, and the prompt's ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = demo_model_path()
    if mode == "resident":
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to("cuda")
        model.set_experts_implementation("batched_mm")
    else:
        options = {"cache_mode": mode, "experts_algorithm": "batched_mm"}
        model = hot.load(path, expert_cache_size=size, device="cuda", **options)
    ids = AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt").input_ids
    return model, ids.to("cuda")


def test_generate_with_a_static_cache_and_cuda_graphs() -> None:
    """`generate` compiles the decode step whole, and Inductor captures it."""
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    torch._dynamo.reset()
    counters.clear()
    found = {}
    for mode in ("resident", "host", "device"):
        model, ids = load(mode)
        options: dict[str, Any] = {"disable_compile": True}
        if mode == "device":
            options = {"compile_config": CompileConfig(fullgraph=True)}
        found[mode] = model.generate(
            ids, max_new_tokens=24, do_sample=False, cache_implementation="static", **options
        ).tolist()
        if mode == "device":
            assert model.expert_cache.stats.misses > 0
            assert counters["stats"]["unique_graphs"] > 0
            assert counters["inductor"]["cudagraph_skips"] == 0
    assert found["device"] == found["host"] == found["resident"]


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_continuous_batching(use_cuda_graph: bool) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    found = {}
    for mode in ("resident", "device"):
        model, ids = load(mode)
        prompt = ids[0].tolist()
        outputs = model.generate_batch(
            [prompt, prompt[:3], prompt[:5]],
            generation_config=GenerationConfig(max_new_tokens=12, do_sample=False),
            continuous_batching_config=ContinuousBatchingConfig(
                use_cuda_graph=use_cuda_graph,
                block_size=32,
                num_blocks=64,
                max_batch_tokens=64,
            ),
        )
        found[mode] = sorted(output.generated_tokens for output in outputs.values())
        assert [len(tokens) for tokens in found[mode]] == [12, 12, 12]
    assert found["device"] == found["resident"]


def test_no_synchronisation_in_a_decode_step() -> None:
    """Between entry and exit of the model's forward the host never waits for the device."""
    from torch.profiler import ProfilerActivity, profile
    from transformers import StaticCache

    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    model, ids = load("device")
    with torch.no_grad():
        kv = StaticCache(config=model.config, max_cache_len=64)
        token = model(ids, past_key_values=kv).logits[:, -1:].argmax(-1)
        for _ in range(2):  # the kernels are compiled
            model(token, past_key_values=kv)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with profile(activities=both) as profiler, torch.profiler.record_function("forward"):
                model(token, past_key_values=kv)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    events = profiler.events()
    (forward,) = [e for e in events if e.name == "forward" and "CUDA" not in str(e.device_type)]
    span = forward.time_range
    inside = [e.name for e in events if span.start <= e.time_range.start <= span.end]
    assert any("plan_gather" in e.name for e in events)
    assert [name for name in inside if "Synchronize" in name or name == "cudaMemcpy"] == []
