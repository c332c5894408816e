"""fp8 and mxfp4 checkpoints that lack scales, or have tensors of other shapes, are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hotexperts.transformers as hot
from hotexperts.errors import CheckpointError
from integrations import zoo

pytestmark = pytest.mark.transformers
Change = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


def dropped(end: str) -> Change:
    return lambda name, tensor: {} if ".experts." in name and name.endswith(end) else {name: tensor}


def changed(end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def one(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: change(tensor).contiguous() if name.endswith(end) else tensor}

    return one


def test_fp8_experts_without_any_scale_are_refused(tmp_path: Path) -> None:
    folder = zoo.build_fp8_checkpoint(tmp_path)
    zoo.rewrite_shards(folder, dropped("_scale_inv"))
    with pytest.raises(CheckpointError, match=r"experts\.0\.\w+\.weight is float8_e4m3fn.*scale"):
        hot.load(folder, expert_cache_size=4)


def test_fp8_without_its_configuration_is_refused(tmp_path: Path) -> None:
    folder = zoo.build_fp8_checkpoint(tmp_path)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config"):
        hot.load(folder, expert_cache_size=4)


@pytest.mark.parametrize(
    "change",
    [
        dropped("gate_up_proj_scales"),
        dropped("gate_up_proj_blocks"),
        dropped("down_proj_scales"),
        changed("down_proj_scales", lambda t: t[..., :-1]),
        changed("gate_up_proj_blocks", lambda t: t[:, :-1]),
        changed("gate_up_proj_blocks", lambda t: t.flatten(-2)),
    ],
    ids=["no-scales", "no-blocks", "no-down-scales", "few-scales", "few-rows", "flat"],
)
def test_damaged_mxfp4_experts_are_refused(change: Change, tmp_path: Path) -> None:
    folder = zoo.build_mxfp4_checkpoint(tmp_path)
    zoo.rewrite_shards(folder, change)
    with pytest.raises(CheckpointError, match=r"(gate_up|down)_proj"):
        hot.load(folder, expert_cache_size=4)
