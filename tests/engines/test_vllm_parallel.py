"""Several ranks, shared experts, chunks and cached prefixes: tokens equal those of stock vLLM in
the same configuration. In float32, where another order of additions changes no token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotexperts.simulate import read_trace

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM warns a lot
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
    "seed": 0,
    "enable_prefix_caching": False,
}
PROMPTS = [[5, 9, 17, 33, 65], list(range(3, 103)), list(range(3, 99))]
NUM_TOKENS = 12
Checkpoint = Callable[[str], Path]


class Ranks:
    """An engine whose workers are processes of their own.

    Args:
        prepare: names of `cpu_worker.ManyRanks`' methods to call before the first step.
    """

    def __init__(self, path: Path, *prepare: str, **options: Any) -> None:
        from vllm import LLM

        options["worker_extension_cls"] = "cpu_worker.ManyRanks"
        self.llm = LLM(str(path), **OPTIONS | options)
        for name in prepare:
            self.llm.collective_rpc(name)

    def generate(self) -> list[list[int]]:
        return generate(self.llm)

    def stats(self) -> list[dict[str, dict[str, int]]]:
        """Each rank's counters: a layer's by its name."""
        return [models[0] for models in self.llm.collective_rpc("expert_cache_stats")]

    def close(self) -> None:
        import psutil

        with suppress(psutil.NoSuchProcess):  # vLLM kills what may have ended by itself
            self.llm.llm_engine.engine_core.shutdown()


def generate(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.syspath_prepend(Path(__file__).parent)  # for workers to find `cpu_worker`


@pytest.mark.usefixtures("two_processes")
def test_two_ranks_cache_their_own_shards(
    checkpoint: Checkpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tensor parallel: each rank has half of every expert; both decide alike, which is watched."""
    stock = Ranks(checkpoint("qwen3"), tensor_parallel_size=2)
    expected = stock.generate()
    assert stock.llm.collective_rpc("expert_cache_stats") == [[], []]
    stock.close()
    more = {"check_ranks": True, "trace": str(tmp_path / "routing.npz")}
    options = {"moe_expert_cache_size": 6, "moe_expert_cache_options": more}
    ranks = Ranks(checkpoint("qwen3"), tensor_parallel_size=2, **options)
    assert ranks.generate() == expected
    first, second = ranks.stats()
    assert first == second
    assert all(layer["evictions"] > 0 for layer in first.values())
    memory = [models[0] for models in ranks.llm.collective_rpc("expert_cache_memory")]
    experts_nbytes = 4 * 16 * 3 * 64 * 128 * 4  # layers, experts, matrices, float32
    assert sum(rank["host"] for rank in memory) == experts_nbytes
    assert [rank["slots"] for rank in memory] == [experts_nbytes // 2 * 6 // 16] * 2
    ranks.llm.collective_rpc("end_expert_trace")
    traces = [read_trace(tmp_path / f"routing.rank{rank}.npz") for rank in (0, 1)]
    assert np.array_equal(traces[0].ids, traces[1].ids)
    assert len(traces[0].ids) == sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_TOKENS - 1)
    ranks.llm.collective_rpc("disturb", args=(1,))
    with pytest.raises(Exception, match="EngineCore encountered an issue"):
        ranks.generate()
    ranks.close()
    assert "ranks decided differently in model.layers.0.mlp.experts:" in capfd.readouterr().out


@pytest.mark.usefixtures("two_processes")
def test_two_ranks_cache_their_own_experts(checkpoint: Checkpoint) -> None:
    """Expert parallel: ids are global, each rank has every second half and its own demand."""
    how = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    stock = Ranks(checkpoint("qwen3"), "heed_expert_maps", **how)
    expected = stock.generate()
    stock.close()
    ranks = Ranks(checkpoint("qwen3"), moe_expert_cache_size=3, **how)
    assert ranks.generate() == expected
    stats = ranks.stats()
    ranks.close()
    assert all(layer["evictions"] > 0 for rank in stats for layer in rank.values())
    demands = [[x["hits"] + x["misses"] for x in rank.values()] for rank in stats]
    assert demands[0] != demands[1]


@pytest.mark.usefixtures("two_processes")
def test_two_stages_cache_their_own_layers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    stock = Ranks(checkpoint("qwen3"), "receive_from_other_stages", pipeline_parallel_size=2)
    expected = stock.generate()
    stock.close()
    ranks = Ranks(
        checkpoint("qwen3"),
        "receive_from_other_stages",
        pipeline_parallel_size=2,
        moe_expert_cache_size=6,
        moe_expert_cache_options={"trace": str(tmp_path / "routing.npz")},
    )
    assert ranks.generate() == expected
    stats = ranks.stats()
    files = [name for (name,) in ranks.llm.collective_rpc("end_expert_trace")]
    ranks.close()
    layers = [[f"model.layers.{i}.mlp.experts" for i in stage] for stage in ((0, 1), (2, 3))]
    assert [list(stage) for stage in stats] == layers
    assert [read_trace(name).meta["layers"] for name in files] == layers
    assert all(layer["evictions"] > 0 for stage in stats for layer in stage.values())


def test_shared_experts_chunks_and_prefixes_give_the_stock_tokens(checkpoint: Checkpoint) -> None:
    """A prompt longer than a step, decode beside its parts, and a second one that begins alike;
    both again, from cached prefixes."""
    from vllm import LLM

    options = OPTIONS | {"max_num_batched_tokens": 24, "enable_prefix_caching": True}
    options["block_size"] = 32  # of which a prompt has three
    stock = LLM(str(checkpoint("qwen2")), **options)
    expected = [generate(stock), generate(stock)]
    assert expected[0] == expected[1]
    cached = LLM(str(checkpoint("qwen2")), moe_expert_cache_size=5, **options)
    assert [generate(cached), generate(cached)] == expected
    reused = cached.generate(
        [{"prompt_token_ids": PROMPTS[1]}], cached.get_default_sampling_params(), use_tqdm=False
    )
    assert reused[0].num_cached_tokens > 0
    (stats,) = cached.collective_rpc("expert_cache_stats")[0]
    assert all(layer["bypasses"] > 0 for layer in stats.values())
