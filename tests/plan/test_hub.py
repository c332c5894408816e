"""Models of the hub, as a user asks for them: in processes of their own, against a hub of our own.

`huggingface_hub` reads its address and cache from the environment once, as it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from header_checkpoint import CONFIG, save
from hotexperts.plan.source import read_facts
from plan.hub import COMMIT, Hub, running

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(
        not importlib.util.find_spec("huggingface_hub"), reason="needs huggingface_hub"
    ),
]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "hub/org").mkdir(parents=True)
    with running(tmp_path / "hub") as found:
        yield found


def plan(tmp_path: Path, url: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"}
    argv = [sys.executable, "-m", "hotexperts", "plan", *arguments, "--vram", "2GiB", "--json"]
    return subprocess.run(
        argv, capture_output=True, text=True, env=clean | home | env, timeout=120, check=False
    )


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def split(folder: Path) -> None:
    """One file becomes two, with an index."""
    names = {}
    for layer in range(2):
        part = folder / f"model-{layer + 1:05}-of-00002.safetensors"
        _write(part, {f"model.layers.{layer}.mlp.experts.{e}.up.weight": 4096 for e in range(64)})
        names[f"layer{layer}"] = part.name
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _write(path: Path, tensors: dict[str, int]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, nbytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + at)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_hub_id_is_read_by_its_headers(is_split: bool, hub: Hub, tmp_path: Path) -> None:
    folder = save(hub.folder / "org/model")
    if is_split:
        split(folder)
    facts = read_facts(folder)
    done = plan(tmp_path, hub.url, "org/model")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["host_nbytes"] == facts.expert_nbytes
    assert found["gpu_nbytes"]["other weights"] == facts.other_nbytes
    assert found["commands"][0].startswith("vllm serve org/model --moe-expert-cache-gib 2")
    assert 0 < hub.num_bytes < 400_000  # of 1.5 GB
    assert done.stderr == ""


def test_what_is_in_the_cache_needs_no_hub(hub: Hub, tmp_path: Path) -> None:
    snapshot = tmp_path / "home/hub/models--org--model/snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    save(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    done = plan(tmp_path, "http://127.0.0.1:9", "org/model", HF_HUB_OFFLINE="1")
    assert json.loads(done.stdout)["host_nbytes"] == read_facts(snapshot).expert_nbytes
    (snapshot / "model.safetensors").unlink()  # only the configuration is left
    said = refusal(plan(tmp_path, hub.url, "org/model", HF_HUB_OFFLINE="1"))
    assert "nor whole in the hub's cache, and HF_HUB_OFFLINE is set" in said
    save(hub.folder / "org/model")
    assert plan(tmp_path, hub.url, "org/model").returncode == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, "RepoNotFound"), "neither a folder here nor a model of the hub, or a private one"),
        ((401, "GatedRepo"), "it has terms: accept them on its page"),
        ((403, "GatedRepo"), "it has terms: accept them on its page"),
        ((403, ""), "the hub answers 403: give a token that may read it"),
        ((404, "RepoNotFound"), "neither a folder here nor a model of the hub"),
        ((404, "EntryNotFound"), "the hub's repository has no config.json"),
        ((500, ""), "the hub answers 500: try again later"),
    ],
)
def test_a_refusal_says_what_to_do(
    answer: tuple[int, str], message: str, hub: Hub, tmp_path: Path
) -> None:
    save(hub.folder / "org/model")
    hub.statuses["org/model"] = answer
    assert f"org/model: {message}" in refusal(plan(tmp_path, hub.url, "org/model"))


def test_a_hub_out_of_reach_is_told(tmp_path: Path) -> None:
    said = refusal(plan(tmp_path, "http://127.0.0.1:9", "org/model"))
    assert "): check the name and the connection" in said.split("the hub cannot be reached (")[1]
    said = refusal(plan(tmp_path, "http://127.0.0.1:9", "org/model", HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE is set: unset it, or download the model" in said


def test_a_repository_without_safetensors_is_told(hub: Hub, tmp_path: Path) -> None:
    (save(hub.folder / "org/model") / "model.safetensors").unlink()
    said = refusal(plan(tmp_path, hub.url, "org/model"))
    assert "has no safetensors: download a GGUF file and give its path" in said
    (hub.folder / "org/dense").mkdir()
    (hub.folder / "org/dense/config.json").write_text('{"num_hidden_layers": 2}')
    shutil.copy(save(tmp_path / "other") / "model.safetensors", hub.folder / "org/dense")
    assert "is no Mixture-of-Experts model" in refusal(plan(tmp_path, hub.url, "org/dense"))


def header(tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("garbage", "message"),
    [
        (b"<html>", "the hub's answer is damaged"),
        (b"\xff" * 100, "the hub's answer is damaged"),
        (header([]), "the hub's answer is damaged"),
        (header({"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}}), "corrupt: tensor"),
        (header({"w": {"dtype": 3, "shape": [], "data_offsets": "ab"}}), "cannot be understood"),
    ],
)
def test_a_damaged_answer_is_told(garbage: bytes, message: str, hub: Hub, tmp_path: Path) -> None:
    save(hub.folder / "org/model", CONFIG)
    hub.garbage = garbage
    said = refusal(plan(tmp_path, hub.url, "org/model"))
    assert message in said
    assert "org/model" in said
