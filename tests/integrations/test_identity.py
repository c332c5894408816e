"""The digest by which a saved state knows its model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.transformers import attach, load
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]
FAMILIES = ("olmoe", "gpt_oss", "deepseek_v3", "nemotron_h", "jamba", "granitemoehybrid")
FEW = {"expert_cache_size": 4, "device": "cpu"}


def digest_of(folder: Path, **options: object) -> str:
    found = load(folder, **{**FEW, **options}).expert_cache.model
    assert len(found) == 16
    return found


def change_one(folder: Path, name: str) -> None:
    """The first value of a weight."""

    def change(each: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if each == name:
            tensor.view(-1)[0] += 1
        return {each: tensor}

    zoo.rewrite_shards(folder, change)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_seed_is_another_model(family: str, tmp_path: Path) -> None:
    one = zoo.save_checkpoint(family, tmp_path / "one")
    same = zoo.save_checkpoint(family, tmp_path / "same")
    other = zoo.save_checkpoint(family, tmp_path / "other", seed=1)
    assert digest_of(one) == digest_of(same) != digest_of(other)


def test_it_is_the_same_however_the_model_is_loaded(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("olmoe", tmp_path)
    whole = zoo.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ways = {
        digest_of(folder),
        digest_of(folder, expert_store="file", policy="lru", expert_cache_size=2),
        attach(whole, **FEW).expert_cache.model,
    }
    assert len(ways) == 1


@pytest.mark.parametrize(
    "name", ["mlp.gate.weight", "self_attn.q_proj.weight", "input_layernorm.weight"]
)
def test_one_weight_makes_another_model(name: str, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("olmoe", tmp_path)
    before = digest_of(folder)
    change_one(folder, f"model.layers.1.{name}")
    assert digest_of(folder) != before


def test_a_state_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    first = load(zoo.save_checkpoint("olmoe", tmp_path / "a"), **FEW)
    first(torch.tensor([[1, 2, 3]]))
    first.expert_cache.save_state(tmp_path / "state")
    other = load(zoo.save_checkpoint("olmoe", tmp_path / "b", seed=1), **FEW)
    with pytest.raises(ConfigError, match=r"another model with the same shapes.*give that model"):
        other.expert_cache.load_state(tmp_path / "state")
    text = (tmp_path / "state").read_text()
    (tmp_path / "old").write_text(text.replace(f'"model": "{first.expert_cache.model}", ', ""))
    with pytest.raises(CheckpointError, match="an earlier version wrote it: delete it"):
        first.expert_cache.load_state(tmp_path / "old")
    first.expert_cache.load_state(tmp_path / "state")
