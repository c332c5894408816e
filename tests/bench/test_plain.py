"""What a benchmark decides without tensors: bounds, shapes, routing, what changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotexperts.bench.bound import bound
from hotexperts.bench.earlier import changes, check_same, read_earlier
from hotexperts.bench.routing import find_routing
from hotexperts.bench.shapes import SHAPES, Shape, find_shape
from hotexperts.errors import ConfigError
from hotexperts.fields import FieldError
from hotexperts.simulate import Trace, write_trace

TINY = Shape("olmoe", {"num_hidden_layers": 3}, num_experts=8, top_k=2)


def test_bounds_by_hand() -> None:
    found = bound(ms=4.0, resident_ms=2.0, missed_nbytes=54e6, link_gb_s=54)
    assert found.serial_floor_ms == pytest.approx(2 + 1 / 0.94)
    assert found.percent_of_bound == pytest.approx(50), "the resident step is longer than a copy"
    found = bound(ms=12.5, resident_ms=2.0, missed_nbytes=540e6, link_gb_s=54)
    assert found.percent_of_bound == pytest.approx(80), "the copy is longer than the resident step"
    assert bound(10.13, 2.20, 0.392e9, 54).percent_of_bound == pytest.approx(71.7, abs=0.1)


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("OLMoE-1B-7B", 6.92),
        ("Qwen3-30B-A3B", 30.53),
        ("Mixtral-8x7B", 46.70),
        ("DeepSeek-V2-Lite", 15.71),
    ],
)
def test_shapes_have_the_parameters_of_their_models(name: str, billions: float) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPES[name]
    config = AutoConfig.for_model(shape.model_type, **shape.sizes, tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_shape_by_name_and_with_fewer_layers() -> None:
    assert find_shape("mixtral-8X7B", None) == ("Mixtral-8x7B", SHAPES["Mixtral-8x7B"])
    _, cut = find_shape("DeepSeek-V2-Lite", 2)
    assert cut.sizes == {**SHAPES["DeepSeek-V2-Lite"].sizes, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match=r"--layers 1: give 2 to 27"):  # the first has no experts
        find_shape("DeepSeek-V2-Lite", 1)
    with pytest.raises(ConfigError, match=r"--layers 17: give 1 to 16"):
        find_shape("OLMoE-1B-7B", 17)
    with pytest.raises(ConfigError, match=r"--shape 'gpt': give one of OLMoE-1B-7B, Qwen3"):
        find_shape("gpt", None)


def saved_trace(path: Path, num_tokens: int = 6, num_experts: int = 8, top_k: int = 2) -> Path:
    """Two sequences in 2 layers."""
    rng = np.random.default_rng(0)
    ids = rng.random((2 * num_tokens, 2, num_experts)).argsort(axis=2)[..., :top_k]
    seq = np.repeat([0, 1], num_tokens)
    meta = {"n_experts": num_experts}
    write_trace(Trace(ids, np.ones(2 * num_tokens, int), seq, meta), path)
    return path


def test_the_trace_of_a_shape_is_found_in_a_folder(tmp_path: Path) -> None:
    path = saved_trace(tmp_path / "right.npz")
    saved_trace(tmp_path / "other.npz", top_k=4)
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    for place in (tmp_path, path):
        found = find_routing(place, TINY, 5)
        assert found.about == "right.npz"
        assert found.ids.shape == (2, 5, 2, 2), "cut to what is needed"
    saved_trace(tmp_path / "second.npz")
    with pytest.raises(ConfigError, match=r"there is right\.npz, second\.npz: name the file"):
        find_routing(tmp_path, TINY, 5)


def test_routing_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = saved_trace(tmp_path / "t.npz")
    with pytest.raises(ConfigError, match=r"at most 6 tokens a sequence, 7 are wanted: lower"):
        find_routing(path, TINY, 7)
    with pytest.raises(ConfigError, match=r"2 of 8 experts, the shape has 4 of 16"):
        find_routing(path, Shape("olmoe", {}, 16, 4), 5)
    with pytest.raises(ConfigError, match=r"there is none: name the file"):
        find_routing(tmp_path, Shape("olmoe", {}, 16, 4), 5)
    with pytest.raises(ConfigError, match="no such file or folder"):
        find_routing(tmp_path / "x", TINY, 5)
    ids = np.array([[[0, 1]], [[0, -1]]])
    write_trace(Trace(ids, np.ones(2, int), np.zeros(2, int), {"n_experts": 8}), path)
    with pytest.raises(ConfigError, match="not recorded: give another"):
        find_routing(path, TINY, 2)


def test_drawn_routing_is_of_the_shape() -> None:
    found = find_routing(None, TINY, 5)
    assert found.about == "drawn, fitted"
    assert found.ids.shape == (48, 5, 3, 2)
    assert (found.ids.min(), found.ids.max()) == (0, 7)


def result(**changes: Any) -> dict[str, Any]:
    def part(speed: float, hits: float | None) -> dict[str, Any]:
        return {"tokens_per_s": speed, "prefill_ms": 10.0, "hit_rate": hits}

    rows = [
        {"capacity": None, "batch": 1, "warm": part(100, None)},
        {"capacity": 4, "batch": 1, "cold": part(40, 0.5), "warm": part(50, 0.75)},
    ]
    about = {"benchmark": "hotexperts bench", "model": "m", "num_layers": 2, "steps": 8}
    return {**about, "rows": rows, **changes}


def saved(data: Any, path: Path) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_changes_by_hand(tmp_path: Path) -> None:
    earlier = read_earlier(saved(result(), tmp_path / "e.json"))
    now = result()
    now["rows"][1]["warm"] = {"tokens_per_s": 60.0, "prefill_ms": 5.0, "hit_rate": 0.7}
    now["rows"].append({"capacity": 8, "batch": 1, "warm": now["rows"][1]["warm"]})
    check_same(earlier, now)
    found = changes(earlier, now)
    assert [(row["capacity"], row["start"]) for row in found] == [
        (None, "warm"),
        (4, "cold"),
        (4, "warm"),
    ], "8 slots were not measured before"
    assert found[2]["tokens_per_s"] == {"before": 50, "now": 60, "change": pytest.approx(0.2)}
    assert found[2]["prefill_ms"]["change"] == -0.5
    assert found[2]["hit_rate"]["now"] == 0.7
    assert found[0]["hit_rate"] == {"before": None, "now": None, "change": None}


@pytest.mark.parametrize("changed", [{"model": "n"}, {"num_layers": 3}, {"steps": 9}])
def test_something_else_is_not_compared(changed: dict[str, Any], tmp_path: Path) -> None:
    earlier = read_earlier(saved(result(), tmp_path / "e.json"))
    (name,) = changed
    with pytest.raises(ConfigError, match=rf"e\.json: {name} was .*: compare the same"):
        check_same(earlier, result(**changed))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{}], "is not what `hotexperts bench --json` prints"),
        ({"benchmark": "core-decode"}, "is not what `hotexperts bench --json` prints"),
        ({"benchmark": 3}, "field 'benchmark': 3: text was wanted"),
    ],
)
def test_another_file_is_no_earlier_result(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=message):
        read_earlier(saved(data, tmp_path / "e.json"))


def test_a_malformed_earlier_result_names_its_field(tmp_path: Path) -> None:
    broken = result()
    broken["rows"][1]["warm"]["tokens_per_s"] = "fast"
    earlier = read_earlier(saved(broken, tmp_path / "e.json"))
    with pytest.raises(FieldError, match=r"'rows\[1\]\.warm\.tokens_per_s': 'fast': a number"):
        changes(earlier, result())
