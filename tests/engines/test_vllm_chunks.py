"""vLLM's own repacking of a layer in parts: the bits of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM warns a lot
NUM_TOKENS = 12


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_repacked_in_parts_are_the_same_bit_for_bit(
    dtype: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen experts, at most five at a time: in four parts. No GPU is too small here, so the
    answer that it is is given by hand."""
    import torch
    from vllm import LLM, SamplingParams

    from hotexperts.integrations.vllm import hooks
    from hotexperts.integrations.vllm.caches import ModelCaches

    process = ModelCaches.process
    sizes: list[int] = []

    def in_parts(caches: Any, layer: Any, method: Any, repack: Callable[[Any], None]) -> None:
        def counted(layer: Any) -> None:
            sizes.append(len(layer.w13_weight))
            repack(layer)

        caches.in_parts = torch.device("cpu"), 5
        process(caches, layer, method, counted)

    def run() -> tuple[list[int], dict[str, Any]]:
        llm = LLM(
            str(checkpoint("qwen3")),
            dtype=dtype,
            max_model_len=256,
            max_num_seqs=2,
            enforce_eager=True,
            moe_expert_cache_size=6,
        )
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        inputs = [{"prompt_token_ids": list(range(3, 43))}]
        (output,) = llm.generate(inputs, params, use_tqdm=False)
        ours = llm.llm_engine.vllm_config.instance_id
        (caches,) = [c for c in hooks.models() if c.config.instance_id == ours]
        rows = {name: p.store.rows.clone() for name, p in caches.providers.items()}
        return list(output.outputs[0].token_ids), rows

    expected_tokens, expected = run()
    monkeypatch.setattr(ModelCaches, "process", in_parts)
    tokens, found = run()
    assert sizes == [4, 4, 4, 4] * 4
    assert tokens == expected_tokens
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
