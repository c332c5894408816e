"""Stock vLLM on a GPU: cached equals resident in every format and graph mode, in one process.

    python -m pytest -m vllm_gpu tests/engines/test_vllm_gpu.py

One engine a format: its slots are changed as it runs and its graphs captured anew, and its first
run is without a cache, over all experts and by vLLM's own code. The weights are random; vLLM
repacks them as it would a checkpoint's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

pytestmark = [pytest.mark.vllm_gpu, pytest.mark.filterwarnings("ignore")]
QWEN3 = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 512,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_local_experts": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(4)]
FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8-block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": GATES,
    },
    "fp8-tensor": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": GATES,
    },
    "fp8-channel": compressed(
        {**FP8, "strategy": "channel", "dynamic": False},
        {**FP8, "strategy": "token", "dynamic": True},
        "float-quantized",
    ),
    "gptq-int4": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "dynamic": {r"-:.*mlp\.gate$": {}},
    },
    "awq-int4": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["mlp.gate"],
    },
    "ct-int4": compressed({**INT4, "dynamic": False}, None, "pack-quantized"),
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
# Marlin splits a sum over the GPU by the order of its blocks, and that follows the slots. One scale
# for a whole tensor of activations is that of the rows which a wave computes, and of what stock
# vLLM computes for padding.
IS_EXACT = ("bf16", "fp8-block", "fp8-channel")
RUNS_ON_TRITON = (*IS_EXACT, "fp8-tensor")
PROMPTS = [
    [list(range(5, 20))],
    [list(range(3 + i, 12 + 2 * i)) for i in range(5)],  # runs as eight: three rows are padding
    [[(7 * i + j) % 500 + 5 for i in range(300)] for j in range(2)],  # eager, over capacity
]
NUM_TOKENS = 16
CACHE = {"moe_expert_cache_size": 8, "moe_expert_cache_options": {"self_test": True}}


def start(folder: Path, name: str, **options: Any) -> Any:
    import vllm_engine

    base = GPT_OSS if name == "mxfp4" else {**vllm_engine.QWEN3_30B, **QWEN3}
    quantization = FORMATS[name]
    shape = base | ({"quantization_config": quantization} if quantization else {})
    small = {
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 28,  # several tests may share the GPU
        "compilation_config": {"cudagraph_capture_sizes": [1, 8], "mode": 0}
        | ({} if "compilation_config" in options else {"cudagraph_mode": "FULL_DECODE_ONLY"}),
    }
    return vllm_engine.Engine(folder, shape, **small | CACHE | options)


def runs(engine: Any) -> list[Any]:
    return [engine.generate(prompts, NUM_TOKENS) for prompts in PROMPTS]


def assert_same(found: list[Any], expected: list[Any], *, is_exact: bool) -> None:
    if is_exact:
        assert found == expected
        return
    # A sampled token may differ from where two are nearly as likely, and all that follow it do; the
    # first ones' probabilities may not.
    pairs = [pair for runs in zip(found, expected, strict=True) for pair in zip(*runs, strict=True)]
    firsts = [(a[1][0], b[1][0]) for a, b in pairs if a[0][0] == b[0][0]]
    assert len(firsts) >= 0.7 * len(pairs)
    assert all(abs(ours - theirs) < 0.3 for ours, theirs in firsts)


@pytest.mark.parametrize("name", FORMATS)
def test_cached_equals_resident(name: str, tmp_path: Path) -> None:
    engine = start(tmp_path, name)
    kernels = {type(e._multiply.__self__).__name__ for e in engine.caches.layers.values()}
    assert kernels == {"TritonExperts" if name in RUNS_ON_TRITON else "MarlinExperts"}
    engine.use_slots(0)
    expected = runs(engine)
    assert len({token for run in expected for tokens, _ in run for token in tokens}) > 50
    again = runs(engine)
    # Five sequences in a graph for eight: what is computed for the other three is never the same,
    # and one scale for the whole tensor follows it.
    unpadded = 1 if name == "fp8-tensor" else len(PROMPTS)
    assert_same(again[:unpadded], expected[:unpadded], is_exact=name in RUNS_ON_TRITON)
    assert_same(again, expected, is_exact=name in IS_EXACT)
    for capacity in (16, 8, 5):
        engine.use_slots(capacity)
        assert_same(runs(engine), expected, is_exact=name in IS_EXACT)
        sums = engine.sums()
        assert sums["calls"] > 0
        assert (sums["evictions"] > 0) == (capacity < 16)


@pytest.mark.parametrize("name", FORMATS)
def test_layers_in_parts_are_the_same_bit_for_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is repacked in parts of at most five of its sixteen experts, and then whole."""
    from hotexperts.integrations.vllm.caches import ModelCaches
    from hotexperts.integrations.vllm.chunks import _State, repack_in_parts

    process = ModelCaches.process
    in_parts: dict[str, torch.Tensor] = {}

    def in_both_ways(caches: Any, layer: Any, method: Any, repack: Any) -> None:
        device = next(layer.parameters()).device
        before = _State(layer), _State(method)
        for parameter in layer.parameters(recurse=False):
            parameter.data = parameter.data.cpu()
        found = repack_in_parts(layer, method, repack, 5, device, pin=False)
        in_parts[layer.layer_name] = found.store.rows
        for state in before:
            state.restore()
        for parameter in layer.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        process(caches, layer, method, repack)

    monkeypatch.setattr(ModelCaches, "process", in_both_ways)
    engine = start(tmp_path, name, moe_expert_cache_options={"packing": "none"})
    whole = {name: p.store.rows for name, p in engine.caches.providers.items()}
    assert list(in_parts) == list(whole)
    assert all(torch.equal(in_parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    "how",
    [
        {"enforce_eager": True},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 8], "cudagraph_mode": "PIECEWISE"}},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 8]}},
    ],
    ids=["eager", "piecewise", "full-and-piecewise"],
)
def test_graph_modes_equal_resident(how: dict[str, Any], tmp_path: Path) -> None:
    engine = start(tmp_path, "bf16", **how)
    engine.use_slots(0)
    expected = runs(engine)
    for capacity in (8, 5):
        engine.use_slots(capacity)
        assert_same(runs(engine), expected, is_exact=True)


@pytest.mark.parametrize(
    ("name", "prefetch"),
    [("bf16", "router"), ("gptq-int4", "router"), ("mxfp4", "router"), ("bf16", "lift")],
)
def test_prefetching_equals_resident(name: str, prefetch: str, tmp_path: Path) -> None:
    """The next gate guesses, in eager steps and in full graphs, right and wrong; or the table."""
    options = {"packing": "auto", "prefetch": prefetch}
    engine = start(tmp_path, name, moe_expert_cache_options=options)
    layers = list(engine.caches.layers.values())
    assert all((layer.guess is None) == (prefetch == "lift") for layer in layers[:-1])
    engine.use_slots(0)
    expected = runs(engine)
    for capacity in (8, 5):
        engine.use_slots(capacity)
        assert_same(runs(engine), expected, is_exact=name in IS_EXACT)
        kernels = [layer.provider.kernel for layer in layers]
        issued = [int(kernel.ahead_counters[0]) for kernel in kernels]
        used = [int(kernel.ahead_counters[2]) for kernel in kernels]
        assert issued[0] == 0
        assert all(issued[1:])
        assert sum(used) > 0


def test_ngram_speculation_equals_resident(tmp_path: Path) -> None:
    """Greedy, where several tokens are verified in one step; the count of valid tokens varies."""
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    engine = start(tmp_path, "bf16", speculative_config=speculation)
    prompts = [[5, 6, 7, 8] * 8, list(range(3, 40))]
    engine.use_slots(0)
    expected = engine.generate(prompts, 48, temperature=0.0)
    for capacity in (16, 6):
        engine.use_slots(capacity)
        found = engine.generate(prompts, 48, temperature=0.0)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_padding_asks_for_nothing(tmp_path: Path) -> None:
    """Five sequences run in a graph for eight."""
    engine = start(tmp_path, "bf16")
    engine.use_slots(16)
    engine.caches.reset()
    engine.generate(PROMPTS[1], NUM_TOKENS)
    sums = engine.sums()
    most = (NUM_TOKENS - 1) * 5 * 4 * 4 + 4 * 16  # each token's four in four layers, and prefill's
    assert sums["hits"] + sums["misses"] <= most


def test_a_model_larger_than_the_gpu_runs(tmp_path: Path) -> None:
    """What PyTorch may allocate is less than the experts alone."""
    import vllm_engine

    shape = {**vllm_engine.QWEN3_30B, "num_hidden_layers": 4, "vocab_size": 8192}  # 4.8 GB
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(3.5 * 2**30 / total)
    try:
        engine = vllm_engine.Engine(
            tmp_path,
            shape,
            moe_expert_cache_size=16,
            gpu_memory_utilization=3.4 * 2**30 / total,
            kv_cache_memory_bytes=1 << 28,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=1024,
            compilation_config={"cudagraph_capture_sizes": [1, 8], "mode": 0},
        )
        found = engine.generate(PROMPTS[0], 8)
        assert len(found[0][0]) == 8
        assert torch.cuda.max_memory_allocated() < 3.5 * 2**30
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
