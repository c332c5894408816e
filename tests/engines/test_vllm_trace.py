"""The trace of a served model: the ids that its routers gave, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotexperts.simulate import read_trace, replay

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM warns a lot
PROMPTS = [list(range(3, 63)), [5, 9, 17, 33, 65], list(range(7, 37))]
NUM_TOKENS = 9


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
