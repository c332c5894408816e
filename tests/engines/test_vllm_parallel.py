"""Several ranks, shared experts, chunks and cached prefixes: tokens equal those of stock vLLM in
the same configuration. On CPUs in float32, where another order of additions changes no token; on
GPUs in bfloat16, bit for bit, inside CUDA graphs:

    python -m pytest -m vllm_gpu tests/engines/test_vllm_parallel.py
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotexperts.simulate import read_trace

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM warns a lot
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "seed": 0,
    "enable_prefix_caching": False,
}
ON_CPU = {"dtype": "float32", "enforce_eager": True}
ON_GPU = {
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,
    "compilation_config": {
        "cudagraph_capture_sizes": [1, 4, 8],
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "mode": 0,
    },
}
PROMPTS = [[5, 9, 17, 33, 65], list(range(3, 103)), list(range(3, 99))]
NUM_TOKENS = 12
Checkpoint = Callable[[str], Path]
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.vllm),
    pytest.param("cuda", marks=pytest.mark.vllm_gpu),
]


@pytest.fixture(params=DEVICES)
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`LLM`'s, for one process."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("vLLM is one for GPUs here")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    yield OPTIONS | (ON_CPU if request.param == "cpu" else ON_GPU)
    if request.param == "cuda":
        from vllm.distributed import cleanup_dist_env_and_memory

        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture
def two(options: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`LLM`'s, for workers that are processes of their own."""
    if not is_on_cpu(options) and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there is {torch.cuda.device_count()}")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # NVLink's multicast
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    if not is_on_cpu(options):  # this process has asked how many GPUs there are
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.syspath_prepend(Path(__file__).parent)  # for workers to find `cpu_worker`
    return options | {"worker_extension_cls": "cpu_worker.ManyRanks"}


def is_on_cpu(options: dict[str, Any]) -> bool:
    return options["dtype"] == ON_CPU["dtype"]


class Ranks:
    """An engine whose workers are processes of their own.

    Args:
        prepare: names of `cpu_worker.ManyRanks`' methods to call before the first step on CPUs.
    """

    def __init__(self, path: Path, options: dict[str, Any], *prepare: str, **more: Any) -> None:
        from vllm import LLM

        self._is_on_cpu = is_on_cpu(options)
        self.llm = LLM(str(path), **options | more)
        for name in prepare if self._is_on_cpu else ():
            self.llm.collective_rpc(name)

    def generate(self) -> list[list[int]]:
        """Together; on GPUs, where the last bits follow who else is in a step, one by one."""
        if self._is_on_cpu:
            return generate(self.llm, PROMPTS)
        return [tokens for prompt in PROMPTS for tokens in generate(self.llm, [prompt])]

    def has_graphs(self) -> bool:
        """Whether steps ran as they should: in CUDA graphs, which CPUs do not have."""
        return self._is_on_cpu or all(num > 0 for num in self.llm.collective_rpc("num_graphs"))

    def stats(self) -> list[dict[str, dict[str, int]]]:
        """Each rank's counters: a layer's by its name."""
        return [models[0] for models in self.llm.collective_rpc("expert_cache_stats")]

    def close(self) -> None:
        import psutil

        with suppress(psutil.NoSuchProcess):  # vLLM kills what may have ended by itself
            self.llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_two_ranks_cache_their_own_shards(
    checkpoint: Checkpoint, two: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tensor parallel: each rank has half of every expert; both decide alike, which is watched."""
    stock = Ranks(checkpoint("qwen3"), two, tensor_parallel_size=2)
    expected = stock.generate()
    assert stock.has_graphs()
    assert stock.llm.collective_rpc("expert_cache_stats") == [[], []]
    stock.close()
    more = {"check_ranks": True, "trace": str(tmp_path / "routing.npz")}
    cache = {"moe_expert_cache_size": 6, "moe_expert_cache_options": more}
    ranks = Ranks(checkpoint("qwen3"), two, tensor_parallel_size=2, **cache)
    assert ranks.generate() == expected
    assert ranks.has_graphs()
    first, second = ranks.stats()
    if not is_on_cpu(two):  # packed shards take different bytes
        for layer in (*first.values(), *second.values()):
            assert layer.pop("bytes_moved") > 0
    assert first == second
    assert all(layer["evictions"] > 0 for layer in first.values())
    memory = [models[0] for models in ranks.llm.collective_rpc("expert_cache_memory")]
    experts_nbytes = 4 * 16 * 3 * 64 * 128 * (4 if is_on_cpu(two) else 2)  # layers, experts, ...
    host_nbytes = sum(rank["host"] for rank in memory)
    assert host_nbytes == experts_nbytes if is_on_cpu(two) else host_nbytes < experts_nbytes
    assert [rank["slots"] for rank in memory] == [experts_nbytes // 2 * 6 // 16] * 2
    ranks.llm.collective_rpc("end_expert_trace")
    traces = [read_trace(tmp_path / f"routing.rank{rank}.npz") for rank in (0, 1)]
    assert np.array_equal(traces[0].ids, traces[1].ids)
    assert len(traces[0].ids) == sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_TOKENS - 1)
    ranks.llm.collective_rpc("disturb", args=(1,))
    with pytest.raises(Exception, match="EngineCore encountered an issue"):
        ranks.generate()
    ranks.close()
    said = "".join(capfd.readouterr())  # vLLM logs to one of the two, as its environment says
    assert "ranks decided differently in model.layers.0.mlp.experts:" in said


def test_two_ranks_cache_their_own_experts(checkpoint: Checkpoint, two: Any) -> None:
    """Expert parallel: ids are global, each rank has every second half and its own demand."""
    how = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    stock = Ranks(checkpoint("qwen3"), two, "heed_expert_maps", **how)
    expected = stock.generate()
    stock.close()
    ranks = Ranks(checkpoint("qwen3"), two, moe_expert_cache_size=3, **how)
    assert ranks.generate() == expected
    assert ranks.has_graphs()
    stats = ranks.stats()
    ranks.close()
    assert all(layer["evictions"] > 0 for rank in stats for layer in rank.values())
    demands = [[x["hits"] + x["misses"] for x in rank.values()] for rank in stats]
    assert demands[0] != demands[1]


def test_two_stages_cache_their_own_layers(
    checkpoint: Checkpoint, two: Any, tmp_path: Path
) -> None:
    stock = Ranks(checkpoint("qwen3"), two, "receive_from_other_stages", pipeline_parallel_size=2)
    expected = stock.generate()
    stock.close()
    ranks = Ranks(
        checkpoint("qwen3"),
        two,
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


def test_shared_experts_chunks_and_prefixes_give_the_stock_tokens(
    checkpoint: Checkpoint, options: Any
) -> None:
    """A prompt longer than a step, decode beside its parts, and a second one that begins alike;
    both again, from cached prefixes."""
    from vllm import LLM

    options |= {"max_num_batched_tokens": 24, "enable_prefix_caching": True}
    options["block_size"] = 32  # of which a prompt has three
    stock = LLM(str(checkpoint("qwen2")), **options)
    expected = [generate(stock, PROMPTS), generate(stock, PROMPTS)]
    if is_on_cpu(options):  # on GPUs the last bits follow the chunks
        assert expected[0] == expected[1]
    cached = LLM(str(checkpoint("qwen2")), moe_expert_cache_size=5, **options)
    assert [generate(cached, PROMPTS), generate(cached, PROMPTS)] == expected
    reused = cached.generate(
        [{"prompt_token_ids": PROMPTS[1]}], cached.get_default_sampling_params(), use_tqdm=False
    )
    assert reused[0].num_cached_tokens > 0
    stats = cached.collective_rpc("expert_cache_stats")[0][-1]  # of the youngest model
    assert all(layer["bypasses"] > 0 for layer in stats.values())
