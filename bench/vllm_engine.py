"""vLLM in this process on a model of random weights: slots, graphs and routing change as it runs.

The parts of an engine that a benchmark turns: how many slots a layer has (0: stock, every expert
resident), which ids its routers give, and how long its steps take. The first engine of a process
sets vLLM up for all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hotexperts.bench.vllm import engine as in_vllm
from hotexperts.bench.vllm.model import Model, synchronize
from hotexperts.bench.vllm.replay import Replay as AnyReplay

os.environ |= in_vllm.ENVIRONMENT
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 24,  # of 48
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
ENGINE = in_vllm.OPTIONS | {
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
}


class Engine(in_vllm.Engine):
    """One `LLM` on random weights, in this process, whose steps are timed.

    Args:
        folder: for the model's configuration, which is all that is written.
        shape: the configuration.
        options: of `LLM`; `moe_expert_cache_size` asks for a cache.
    """

    def __init__(self, folder: Path, shape: dict[str, Any], **options: Any) -> None:
        super().__init__(folder, shape, **ENGINE | options)
        self.counts: dict[str, int] = {}  # of the last timed steps

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float = 1.0
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens of each prompt and their log probabilities."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature,
                seed=index,
                max_tokens=num_tokens,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = [o.outputs[0] for o in self.llm.generate(inputs, params, use_tqdm=False)]
        return [(list(o.token_ids), _chosen(o.token_ids, o.logprobs)) for o in outputs]

    def timed_decode(
        self, batch: int, num_warm: int, num_steps: int, prompt_tokens: int = 64
    ) -> list[float]:
        """Milliseconds of each step after the warm ones; counters start with them.

        Steps are enqueued ahead of the device, so that the mean is the step's time.
        """

        def end() -> None:
            synchronize()
            self.counts = self.sums() if self.has_slots else {}

        def begin() -> None:
            synchronize()
            self.reset_stats()

        return decode_steps(
            self.llm.llm_engine, batch, num_warm, num_steps, prompt_tokens, begin=begin, end=end
        )

    def timed_prefill(self, num_tokens: int) -> float:
        """Milliseconds from a prompt to its first token."""
        from vllm import SamplingParams

        prompt = [(5 * i) % 200 + 5 for i in range(num_tokens)]
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        synchronize()
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        synchronize()
        return 1e3 * (time.perf_counter() - start)


def decode_steps(
    engine: Any,
    batch: int,
    num_warm: int,
    num_steps: int,
    prompt_tokens: int = 64,
    *,
    begin: Callable[[], Any],
    end: Callable[[], Any],
) -> list[float]:
    """Milliseconds of each step of an `LLMEngine` after the warm ones.

    Args:
        engine: with its scheduler in this process.
        batch: sequences at once.
        num_warm: steps before.
        num_steps: steps that are timed.
        prompt_tokens: of each sequence.
        begin: called before the timed steps, to wait for the device and count from there.
        end: called after them, likewise.
    """
    from vllm import SamplingParams

    total = num_warm + num_steps + 4
    params = SamplingParams(temperature=0.0, max_tokens=total, ignore_eos=True, detokenize=False)
    for row in range(batch):
        prompt = [(7 * row + 3 * i) % 200 + 5 for i in range(prompt_tokens)]
        engine.add_request(f"{time.monotonic_ns()}-{row}", {"prompt_token_ids": prompt}, params)
    taken: list[float] = []
    step = 0
    while engine.has_unfinished_requests():
        if step == num_warm + 2:
            begin()
        start = time.perf_counter()
        engine.step()
        if num_warm + 2 <= step < num_warm + 2 + num_steps:
            taken.append(1e3 * (time.perf_counter() - start))
        if step == num_warm + 1 + num_steps:
            end()
        step += 1
    return taken


def _chosen(tokens: Sequence[int], logprobs: Sequence[Any]) -> list[float]:
    return [among[token].logprob for token, among in zip(tokens, logprobs, strict=True)]


class Replay(AnyReplay):
    """Makes the routers answer a decode step with given ids, and prefills with every expert.

    Args:
        model: before it captures the graphs that are to be measured.
        ids: uint8 or int32 `[steps, layers, rows, K]`; row r of a decode step reads row r.
    """

    def __init__(self, model: Model, ids: torch.Tensor) -> None:
        super().__init__(model, ids.shape[1], ids.shape[3])
        self._num_experts = model.config.model_config.get_num_experts()
        self._ids = ids.int().to(self.shown.device)
        self.step = 0
        self.show_random(0)

    def show_random(self, seed: int) -> None:
        """What prefills see: every expert equally often, no expert twice for one token."""
        num_layers, most, top_k = self.shown.shape
        device = self.shown.device
        generator = torch.Generator(device).manual_seed(seed)
        shape = (num_layers, most, self._num_experts)
        scores = torch.rand(shape, generator=generator, device=device)
        self._prefill = scores.topk(top_k).indices.int()
        self.shown.copy_(self._prefill)

    def show(self, num_tokens: int) -> None:
        """A step of no more tokens than the ids have rows is one of decode."""
        if num_tokens <= self._ids.shape[2]:
            now = self._ids[self.step % len(self._ids)]
            self.shown[:, :num_tokens].copy_(now[:, :num_tokens])
            self.step += 1
        else:
            self.shown.copy_(self._prefill)
