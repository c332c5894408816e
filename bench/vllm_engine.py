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
from collections.abc import Iterator, Sequence
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


class Engine:
    """One `LLM` on random weights.

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
        self.shape = shape
        core = self.llm.llm_engine.engine_core.engine_core
        self.worker = core.model_executor.driver_worker
        self.runner = self.worker.worker.model_runner
        self.config = self.llm.llm_engine.vllm_config
        self._resident: dict[str, Any] = {}
        self.counts: dict[str, int] = {}  # of the last timed steps

    @property
    def caches(self) -> Any:
        """The plug-in's caches of this model."""
        from hotexperts.integrations.vllm import hooks

        ours = self.config.instance_id
        return next(c for c in hooks._alive() if c.config.instance_id == ours)

    def use_slots(self, capacity: int) -> None:
        """Another number of slots a layer; 0 has every expert resident, as without the plug-in."""
        self.clear_graphs()
        for layer in self.caches.layers.values():
            experts = layer._multiply.__self__
            experts.apply = layer.apply
        if capacity == 0:
            self._make_resident()
        else:
            self._resident.clear()
            self.caches.resize(capacity)
        torch.cuda.empty_cache()
        self.capture_graphs()
        if capacity:
            self.caches.reset()

    def _make_resident(self) -> None:
        for name, layer in self.caches.layers.items():
            store = self.caches._stores[name]
            device = layer.provider.slot_buffer.device
            buffer, tensors = store.layout.allocate(store.num_experts, device)
            for expert in range(store.num_experts):
                store.copy_into(expert, [tensor[expert] for tensor in tensors])
            for tensor_name, parameter in layer._parameters.items():
                parameter.data = getattr(tensors, tensor_name)
            layer._multiply.__self__.apply = layer._multiply
            self._resident[name] = buffer

    def clear_graphs(self) -> None:
        """Forget the captured graphs, whose addresses may be old."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        synchronize()
        CUDAGraphWrapper.clear_all_graphs()

    def capture_graphs(self) -> None:
        """Capture them anew."""
        from vllm.config import set_current_vllm_config

        if self.config.model_config.enforce_eager:
            return
        with set_current_vllm_config(self.config):
            self.runner.capture_model()

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
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        total = num_warm + num_steps + 4
        params = SamplingParams(
            temperature=0.0, max_tokens=total, ignore_eos=True, detokenize=False
        )
        for row in range(batch):
            prompt = [(7 * row + 3 * i) % 200 + 5 for i in range(prompt_tokens)]
            engine.add_request(f"{time.monotonic_ns()}-{row}", {"prompt_token_ids": prompt}, params)
        taken: list[float] = []
        step = 0
        while engine.has_unfinished_requests():
            if step == num_warm + 2:
                synchronize()
                self.reset_stats()
            start = time.perf_counter()
            engine.step()
            if num_warm + 2 <= step < num_warm + 2 + num_steps:
                taken.append(1e3 * (time.perf_counter() - start))
            if step == num_warm + 1 + num_steps:
                synchronize()
                self.counts = self.sums() if self.has_slots else {}
            step += 1
        return taken

    @property
    def has_slots(self) -> bool:
        """Whether experts come from a cache now."""
        from hotexperts.integrations.vllm import hooks

        return bool(hooks._alive()) and not self._resident

    def sums(self) -> dict[str, int]:
        """Counters of all layers together."""
        found: dict[str, int] = {}
        for counts in self.caches.stats().values():
            for name, value in counts.items():
                found[name] = found.get(name, 0) + value
        return found

    def reset_stats(self) -> None:
        """Count from here on."""
        for layer in self.caches.layers.values() if self.has_slots else ():
            layer.provider.reset_stats()

    def peak_gpu_gb(self) -> float:
        """The most that tensors took at once, load and graphs included."""
        return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0

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


class Replay:
    """Makes the routers answer with given ids, inside CUDA graphs too.

    Args:
        engine: before it captures the graphs that are to be measured.
        ids: uint8 or int32 `[steps, layers, rows, K]`; row r of a decode step reads row r.
    """

    def __init__(self, engine: Engine, ids: torch.Tensor) -> None:
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        num_layers, top_k = ids.shape[1], ids.shape[3]
        most = ENGINE["max_num_batched_tokens"]
        device = engine.runner.device
        self._num_experts = engine.shape["num_experts"]
        self._ids = ids.int().to(device)
        self._shown = torch.zeros(num_layers, most, top_k, dtype=torch.int32, device=device)
        self.step = 0
        self._prefill: torch.Tensor | None = None
        layers = engine.config.compilation_config.static_forward_context
        moe = [layer for layer in layers.values() if hasattr(layer, "router")]
        number_of = {id(layer.router): i for i, layer in enumerate(moe)}
        select = BaseRouter._select_experts

        def replayed(router: Any, *args: Any, **kwargs: Any) -> Any:
            weights, found = select(router, *args, **kwargs)
            found.copy_(self._shown[number_of[id(router)], : found.shape[0]])
            return weights, found

        BaseRouter._select_experts = replayed
        execute = engine.runner.execute_model

        def shown(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._show(scheduler_output.total_num_scheduled_tokens)
            return execute(scheduler_output, *args, **kwargs)

        engine.runner.execute_model = shown
        self.show_random(0)

    def show_random(self, seed: int) -> None:
        """What prefills see: every expert equally often, no expert twice for one token."""
        num_layers, most, top_k = self._shown.shape
        device = self._shown.device
        generator = torch.Generator(device).manual_seed(seed)
        shape = (num_layers, most, self._num_experts)
        scores = torch.rand(shape, generator=generator, device=device)
        self._prefill = scores.topk(top_k).indices.int()
        self._shown.copy_(self._prefill)

    def _show(self, num_tokens: int) -> None:
        rows = self._ids.shape[2]
        if num_tokens <= rows:
            now = self._ids[self.step % len(self._ids)]
            self._shown[:, :num_tokens].copy_(now[:, :num_tokens])
            self.step += 1
        elif self._prefill is not None:
            self._shown.copy_(self._prefill)


def _chosen(tokens: Sequence[int], logprobs: Sequence[Any]) -> list[float]:
    return [among[token].logprob for token, among in zip(tokens, logprobs, strict=True)]


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def random_weights() -> Iterator[None]:
    """Inside, `load_format="dummy"` draws weights that make experts matter.

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

    DummyModelLoader.load_weights = draw_all
    utils.device_loading_context = loading_and_drawing
    try:
        yield
    finally:
        DummyModelLoader.load_weights = load
        utils.device_loading_context = loading


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
