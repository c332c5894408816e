"""Tiny checkpoints, and vLLM made ready for a CPU and for one process."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotexperts.demo import demo_model_path

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*.py"]
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "bos_token_id": 254,
    "eos_token_id": 255,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU the next engine finds nothing of the last one's."""
    yield
    if request.node.get_closest_marker("vllm_gpu") is None:
        return
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    gc.collect()
    cleanup_dist_env_and_memory()
    # The memory of the graphs that are gone: PyTorch captures no others into it.
    type(current_platform)._global_graph_pool = None


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder by name: "demo", or a random model, wide enough to be decided: "qwen3", "olmoe", or
    "qwen2", which has a shared expert beside the routed ones."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            (_save_demo if name == "demo" else _save_random)(name, made[name])
        return made[name]

    return folder


def _save_random(name: str, path: Path) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    sizes = {"intermediate_size": 128, "moe_intermediate_size": 64}
    more = {
        "qwen3": sizes | {"head_dim": 32},
        "qwen2": sizes | {"shared_expert_intermediate_size": 128},
    }
    prefix = {"qwen3": "Qwen3Moe", "qwen2": "Qwen2Moe", "olmoe": "Olmoe"}[name]
    config = getattr(transformers, f"{prefix}Config")(
        **SHAPE, **more.get(name, {"intermediate_size": 64})
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(path)
    words = {f"t{i}": i for i in range(253)} | {"<unk>": 253, "<bos>": 254, "<eos>": 255}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        path
    )


def _save_demo(name: str, path: Path) -> None:
    """The model inside, its head untied: vLLM's OLMoE does not tie it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(demo_model_path(), path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
