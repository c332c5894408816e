"""`hotexperts bench --shape NAME` of a shape that vLLM runs, on a CPU, where it is one of bf16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
RUN = """
import sys
from engines.test_shape_bench import TINY
from hotexperts.bench import shapes
from hotexperts.cli.main import main
shapes.VLLM_SHAPES["tiny"] = shapes.Shape("qwen3_moe", TINY, num_experts=16, top_k=4)
sys.exit(main(sys.argv[1:]))
"""
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def bench(*argv: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own: an engine sets vLLM up for all that follow."""
    command = [sys.executable, "-c", RUN, "bench", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])


def test_a_shape_in_vllm_is_measured_as_one_in_transformers() -> None:
    if torch.cuda.is_available():
        pytest.skip("vLLM is one for GPUs here")
    short = ("--prompt-tokens", 6, "--steps", 5, "--batch", "1,3", "--sequences", 2, "--layers", 2)
    done = bench("--shape", "tiny", *short, "--expert-cache-size", "8,16", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["model"] == "shape of tiny, random weights"
    assert (data["dtype"], data["tolerance"]) == ("bfloat16", 0.05)
    assert (data["num_layers"], data["num_experts"], data["routing"]) == (2, 16, "drawn, fitted")
    rows = data["rows"]
    assert [(row["capacity"], row["batch"]) for row in rows] == [
        (capacity, batch) for capacity in (None, 8, 16) for batch in (1, 3)
    ]
    assert all(row["verified"] is True for row in rows[2:])
    assert [row["largest_difference"] == 0 for row in rows[4:]] == [True, True], "without waves"
    few, all_ = rows[2], rows[4]
    assert few["cold"]["num_steps"] == 5
    assert few["warm"]["num_steps"] == 2 * 5
    assert few["warm"]["hit_rate"] < all_["warm"]["hit_rate"]
    assert all_["groups"][-1]["hit_rate"] == 1, "what was decoded before is there again"
    assert few["warm"]["bytes_per_step"] > 0
    assert few["warm"]["percent_of_bound"] > 0
    assert [group["name"] for group in rows[3]["groups"]] == [
        "sequences 3 to 5",
        "sequences 0 to 2",
    ]
