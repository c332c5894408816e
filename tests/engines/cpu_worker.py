"""Asked of each rank by `collective_rpc`: what vLLM for CPUs lacks, a fault, its graphs."""

from __future__ import annotations

from typing import Any

import torch


class ManyRanks:
    """Methods that vLLM's worker gets (`worker_extension_cls`)."""

    model_runner: Any
    rank: int

    def heed_expert_maps(self) -> None:
        """Without this the CPU kernel reads experts of other ranks beyond its own, and crashes."""
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        multiply = CPUUnquantizedExperts.apply

        def apply(experts: Any, **call: Any) -> None:
            local = call["expert_map"][call["topk_ids"].long()]
            is_here = local >= 0
            weights = torch.where(is_here, call["topk_weights"], 0)
            ids = torch.where(is_here, local, 0).to(call["topk_ids"].dtype)
            multiply(experts, **call | {"topk_ids": ids, "topk_weights": weights})

        CPUUnquantizedExperts.apply = apply

    def receive_from_other_stages(self) -> None:
        """Without compilation vLLM makes what a later stage receives into in no warm-up."""
        runner = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

    def num_graphs(self) -> int:
        """Graphs of whole steps that this worker has captured."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        return sum(len(w.concrete_cudagraph_entries) for w in CUDAGraphWrapper._all_instances)

    def disturb(self, rank: int) -> None:
        """One rank's first layer forgets what the others have in their slots."""
        from hotexperts.integrations.vllm import hooks

        if self.rank == rank:
            next(iter(hooks.models()[0].providers.values())).reset()
