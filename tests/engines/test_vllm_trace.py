"""The trace of a served model: the ids that its routers gave, token by token."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotexperts.simulate import read_trace, replay

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM warns a lot
PROMPTS = [list(range(3, 63)), [5, 9, 17, 33, 65], list(range(7, 37))]
NUM_TOKENS = 9


@pytest.mark.vllm
def test_a_trace_has_the_ids_that_the_routers_gave(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, decode of one sequence beside the prompt of another; the first again
    alone, by a step a token."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    given: dict[int, list[Any]] = {}
    select = BaseRouter.select_experts

    def select_experts(router: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = select(router, *args, **kwargs)
        given.setdefault(id(router), []).append(ids.clone().numpy())
        return weights, ids

    monkeypatch.setattr(BaseRouter, "select_experts", select_experts)
    path = tmp_path / "routing.npz"
    llm = LLM(
        str(checkpoint("qwen3")),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,  # the third waits for a place
        max_num_batched_tokens=24,
        enforce_eager=True,
        enable_prefix_caching=False,
        moe_expert_cache_size=6,
        moe_expert_cache_options={"trace": str(path)},
    )
    given.clear()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for prompts in (PROMPTS, PROMPTS[:1]):
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        llm.generate(inputs, params, use_tqdm=False)
    assert llm.collective_rpc("end_expert_trace") == [[str(path)]]
    trace = read_trace(path)
    expected = np.stack([np.concatenate(calls) for calls in given.values()], axis=1)
    assert np.array_equal(trace.ids, expected)
    assert trace.meta["layers"] == [f"model.layers.{i}.mlp.experts" for i in range(4)]
    assert trace.meta["expert_nbytes"] == 3 * 128 * 64 * 4
    lengths = [len(prompt) for prompt in [*PROMPTS, PROMPTS[0]]]
    for seq, length in enumerate(lengths):
        phases = trace.phase[trace.seq == seq]
        assert phases.tolist() == [0] * length + [1] * (NUM_TOKENS - 1)
    assert (np.diff(trace.seq) != 0).sum() > 4  # tokens of several sequences took turns
    first, again = (trace.ids[trace.seq == seq] for seq in (0, 3))
    assert np.array_equal(first, again)
    assert 0 < replay(trace, "lru", capacity=6).total.hit_rate < 1


@pytest.mark.vllm_gpu
def test_a_trace_is_recorded_inside_graphs(tmp_path: Path) -> None:
    """Two sequences in a graph for eight, whose routers answer with ids that are known."""
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory

    import vllm_engine

    sizes = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    shape = vllm_engine.QWEN3_30B | sizes | heads
    shape |= {"num_hidden_layers": 4, "num_experts": 16, "vocab_size": 512}
    path = tmp_path / "routing.npz"
    engine = vllm_engine.Engine(
        tmp_path / "model",
        shape | {"num_experts_per_tok": 4},
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 28,
        compilation_config={"cudagraph_capture_sizes": [1, 8]},
        moe_expert_cache_size=8,
        moe_expert_cache_options={"trace": str(path)},
    )
    try:
        generator = torch.Generator().manual_seed(0)
        ids = torch.rand(NUM_TOKENS, 4, 2, 16, generator=generator).argsort(-1)[..., :4]
        shown = vllm_engine.Replay(engine, ids)
        engine.clear_graphs()
        engine.capture_graphs()
        engine.generate([list(range(3, 33)), list(range(40, 70))], NUM_TOKENS)
        assert engine.llm.collective_rpc("end_expert_trace") == [[str(path)]]
        prefill = shown._prefill[:, :60].transpose(0, 1).cpu()
    finally:
        del engine
        cleanup_dist_env_and_memory()
    decode = ids[: NUM_TOKENS - 1].transpose(1, 2).flatten(0, 1)
    trace = read_trace(path)
    assert np.array_equal(trace.ids, torch.cat([prefill, decode]).numpy())
    assert trace.phase.tolist() == [0] * 60 + [1] * 2 * (NUM_TOKENS - 1)
    assert trace.seq.tolist() == [0] * 30 + [1] * 30 + [0, 1] * (NUM_TOKENS - 1)
