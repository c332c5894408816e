"""vLLM in this process on a model of random weights: slots, graphs and routing change as it runs.

The parts of an engine that a benchmark turns: how many slots a layer has (0: stock, every expert
resident), which ids its routers give, and how long its steps take. The first engine of a process
sets vLLM up for all of them.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

import torch

from vllm_model import Model, Replay, synchronize

__all__ = ["Engine", "Replay", "random_weights"]

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
ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "seed": 0,
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
}


class Engine(Model):
    """One `LLM` on random weights, in this process.

    Args:
        folder: for the model's configuration, which is all that is written.
        shape: the configuration.
        options: of `LLM`; `moe_expert_cache_size` asks for a cache.
    """

    def __init__(self, folder: Path, shape: dict[str, Any], **options: Any) -> None:
        from vllm import LLM

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shape))
        with random_weights():
            self.llm = LLM(str(folder), **ENGINE | options)
        core = self.llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        super().__init__(self.llm.llm_engine.vllm_config, runner)
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


@contextmanager
def random_weights() -> Iterator[None]:
    """Inside, vLLM draws as `draw_weights` has it."""
    stop = draw_weights()
    try:
        yield
    finally:
        stop()


def draw_weights() -> Callable[[], None]:
    """Let `load_format="dummy"` draw weights that make experts matter; returns what ends it.

    vLLM's own are so small that no error in an expert would be seen, and would take minutes for
    experts that are created on the host: those are drawn when the device has their layer.
    """
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load, loading = DummyModelLoader.load_weights, utils.device_loading_context

    def draw_all(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        for name, tensor in model.state_dict().items():
            if ".experts." not in name:
                _draw(name, tensor)

    @contextmanager
    def loading_and_drawing(module: torch.nn.Module, device: torch.device) -> Iterator[Any]:
        with loading(module, device) as found:
            if type(module).__name__.endswith("RoutedExperts"):
                for name, tensor in module.named_parameters(recurse=False):
                    _draw(f"{module.layer_name}.{name}", tensor.data)
            yield found

    def stop() -> None:
        DummyModelLoader.load_weights = load
        utils.device_loading_context = loading

    DummyModelLoader.load_weights = draw_all
    utils.device_loading_context = loading_and_drawing
    return stop


@torch.no_grad()
def _draw(name: str, tensor: torch.Tensor) -> None:
    """By what the name says that the tensor is; the same whatever was drawn before."""
    if tensor.numel() == 0 or "g_idx" in name or "sort_indices" in name or "shape" in name:
        return
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
    options: dict[str, Any] = {"generator": generator, "device": tensor.device}
    is_scale = "scale" in name
    if tensor.dtype == torch.uint8 and is_scale:  # powers of two, biased by 127
        tensor.copy_(torch.randint(118, 121, tensor.shape, **options))
    elif "zeros" in name or "zero_point" in name:
        tensor.fill_(0x77777777 if tensor.dtype == torch.int32 else 0)
    elif not tensor.is_floating_point():
        limits = torch.iinfo(tensor.dtype)
        tensor.copy_(torch.randint(limits.min, limits.max, tensor.shape, **options))
    elif is_scale:
        step = 0.03 if tensor.dtype == torch.float32 else 0.006  # of 8 and of 4 bits
        tensor.copy_((0.5 + torch.rand(tensor.shape, **options)) * step)
    elif tensor.dim() == 1 and "bias" not in name:
        tensor.fill_(1)
    elif tensor.dtype.itemsize == 1:
        for row in tensor:
            row.copy_(torch.randn(row.shape, **options))
    else:
        tensor.normal_(std=0.03, generator=generator)
