"""vLLM on random weights whose workers may be processes of their own, one a GPU.

What `vllm_engine.Engine` turns in its own process, this asks of every worker (`rank_worker.Bench`).
Scripts set `ENVIRONMENT` first.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import vllm_engine

ENVIRONMENT = {
    # NVLink's multicast stays off in everything that could use it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process may have asked for its GPUs
}


class Ranks:
    """One `LLM`, with its scheduler in this process.

    Args:
        folder: for the model's configuration, which is all that is written.
        shape: the configuration.
        ids: what its routers answer, uint8 `[steps, layers, rows, K]`.
        options: of `LLM`; with a cache.

    Attributes:
        start_seconds: until it could serve, processes and graphs included.
        facts: of each rank: see `rank_worker.Bench.bench_prepare`.
    """

    def __init__(self, folder: Path, shape: dict[str, Any], ids: Any, **options: Any) -> None:
        from vllm import LLM

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shape))
        start = time.perf_counter()
        self.llm = LLM(
            str(folder),
            **vllm_engine.ENGINE | {"worker_extension_cls": "rank_worker.Bench"} | options,
        )
        self.start_seconds = time.perf_counter() - start
        self.facts = self.each("bench_prepare", ids)

    def each(self, method: str, *args: Any) -> list[Any]:
        """What every rank returns."""
        found: list[Any] = self.llm.collective_rpc(method, args=args)
        return found

    def use(self, num_slots: int, *, is_stamped: bool) -> None:
        """So many slots a layer from now on, empty; stamps cost a step time."""
        self.each("bench_use", num_slots, is_stamped)

    def decode(
        self, batch: int, num_warm: int, num_steps: int, *, is_recorded: bool
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Time decode steps of the replay's beginning.

        Returns:
            Milliseconds, and what each rank's `bench_end` says.
        """
        self.each("bench_warm", 0)
        found: list[dict[str, Any]] = []
        taken = vllm_engine.decode_steps(
            self.llm.llm_engine,
            batch,
            num_warm,
            num_steps,
            begin=lambda: self.each("bench_begin", is_recorded),
            end=lambda: found.extend(self.each("bench_end")),
        )
        return {"ms": statistics.fmean(taken), "step_ms": machine.spread(taken)}, found

    def close(self) -> None:
        """End the workers."""
        self.llm.llm_engine.engine_core.shutdown()


def hit_rate(ranks: Sequence[dict[str, Any]]) -> float:
    """Of all ranks together, 1.0 where nothing was asked for."""
    hits, misses = (sum(rank["counts"][name] for rank in ranks) for name in ("hits", "misses"))
    return float(hits / (hits + misses)) if hits + misses else 1.0
