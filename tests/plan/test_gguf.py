"""GGUF files as its own package writes them, and what is no such file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotexperts.cli.main import main
from hotexperts.errors import CheckpointError, UnsupportedModelError
from hotexperts.plan.source import read_facts

gguf = pytest.importorskip("gguf")
Q4, Q6 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 16, 256, 512
# A block of 256 numbers takes 144 bytes in Q4_K and 210 in Q6_K.
Q4_NBYTES, Q6_NBYTES = (EXPERTS * HIDDEN * WIDTH // 256 * block for block in (144, 210))


def save(path: Path, *, shards: int = 0, **changes: Any) -> Path:
    """A Qwen3-MoE in the form of llama.cpp: gate and up in Q4_K, down in Q6_K."""
    writer = gguf.GGUFWriter(
        path, "qwen3moe", split_max_tensors=-(-(2 + 4 * LAYERS) // shards) if shards else 0
    )
    counts = {
        "block_count": LAYERS,
        "expert_count": EXPERTS,
        "expert_used_count": 4,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "embedding_length": HIDDEN,
        "expert_feed_forward_length": WIDTH,
        "context_length": 4096,
        **changes,
    }
    for name, value in counts.items():
        if isinstance(value, list):
            writer.add_array(f"qwen3moe.{name}", value)
        elif value is not None:
            writer.add_uint32(f"qwen3moe.{name}", value)
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("token_embd.weight", np.zeros((3, HIDDEN), np.float16))
    writer.add_tensor("output_norm.weight", np.zeros(HIDDEN, np.float32))
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", np.zeros((4, HIDDEN), np.float32))
        for name, kind in (("gate", Q4), ("up", Q4), ("down", Q6)):
            rows, numbers = (HIDDEN, WIDTH) if name == "down" else (WIDTH, HIDDEN)
            block = 144 if kind == Q4 else 210
            data = np.zeros((EXPERTS, rows, numbers // 256 * block), np.uint8)
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_facts_are_what_the_header_says(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path / "m.gguf"))
    experts = LAYERS * (2 * Q4_NBYTES + Q6_NBYTES)
    assert facts.expert_nbytes == experts
    assert facts.expert_kinds == {"Q4_K": LAYERS * 2 * Q4_NBYTES, "Q6_K": LAYERS * Q6_NBYTES}
    assert facts.other_nbytes == 3 * HIDDEN * 2 + HIDDEN * 4 + LAYERS * 4 * HIDDEN * 4
    assert [(s.num_experts, s.top_k) for s in facts.layers] == [(EXPERTS, 4)] * LAYERS
    assert facts.layers[0].row_nbytes == -(-experts // LAYERS // EXPERTS // 256) * 256
    assert facts.kv_nbytes_per_token == 2 * LAYERS * 2 * 64 * 2
    assert (facts.hidden_size, facts.expert_width, facts.vocab_size) == (HIDDEN, WIDTH, 3)
    assert facts.max_positions == 4096
    assert facts.is_gguf


def test_a_split_file_is_read_by_any_of_its_parts(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path / "whole.gguf"))
    save(tmp_path / "m.gguf", shards=3)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        found = read_facts(part)
        assert (found.expert_nbytes, found.other_nbytes) == (
            facts.expert_nbytes,
            facts.other_nbytes,
        )
    parts[1].unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of 3 parts, m-00002-of"):
        read_facts(parts[0])


def test_heads_may_differ_between_layers(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path / "m.gguf", **{"attention.head_count_kv": [2, 4]}))
    assert facts.kv_nbytes_per_token == 2 * LAYERS * 3 * 64 * 2


def test_a_latent_is_cached_once_for_all_heads(tmp_path: Path) -> None:
    latent = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64}
    facts = read_facts(save(tmp_path / "m.gguf", **latent))
    assert facts.kv_nbytes_per_token == LAYERS * (512 + 64) * 2


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 600, -1])
def test_a_cut_file_is_named(keep: int, tmp_path: Path) -> None:
    path = save(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.gguf: damaged or not GGUF"):
        read_facts(path)


def test_an_endless_list_is_refused_at_once(tmp_path: Path) -> None:
    """The package counts to what the file says, over nothing, after the file's end."""
    key = b"general.x"
    array = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + (2**60).to_bytes(8, "little")
    field = len(key).to_bytes(8, "little") + key + array
    head = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    (tmp_path / "m.gguf").write_bytes(head + field + bytes(100))
    with pytest.raises(CheckpointError, match="a list of 1152921504606846976 items"):
        read_facts(tmp_path / "m.gguf")


def test_what_is_no_such_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    dense = save(tmp_path / "m.gguf", expert_count=None)
    with pytest.raises(UnsupportedModelError, match="is no Mixture-of-Experts model"):
        read_facts(dense)
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.gguf: No such file"):
        read_facts(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match=r"has no \.safetensors: give .*m\.gguf itself"):
        read_facts(tmp_path)
    with pytest.raises(CheckpointError, match="no part of a split file has such a name"):
        read_facts(tmp_path / "m-00004-of-00003.gguf")


def test_the_command_says_that_nothing_runs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(save(tmp_path / "m.gguf"))
    assert main(["plan", path, "--vram", "2GiB"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4.5 MiB Q4_K, 3.28 MiB Q6_K" in out
    assert "vLLM with hotexperts reads no GGUF" in out
    assert "vllm serve" not in out
    assert main(["plan", path, "--vram", "2GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["commands"] == []
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["plan", path, "--vram", "2GiB"]) == 2
    assert "gguf is not installed: pip install -e '.[gguf]'" in capsys.readouterr().err
