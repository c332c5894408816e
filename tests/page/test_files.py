"""Files with anything in any field: a page, or an error that names the field; nothing else."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.test_page import run_data
from hotexperts.fields import FieldError, Fields, read_fields
from hotexperts.page.of_bench import bench_page
from hotexperts.page.of_rows import rows_page
from hotexperts.page.of_run import run_page
from page.test_page import EVIL, assert_needs_nothing, checked

PART = {"prefill_ms": 1.5, "step_ms": 2.0, "tokens_per_s": 500.0, "hit_rate": 0.5}
PART |= {"bytes_per_step": 2048.0, "percent_of_bound": 60.0}
BENCH = {
    "benchmark": "hotexperts bench",
    "model": "m",
    "model_class": "C",
    "dtype": "bfloat16",
    "num_experts": 8,
    "num_layers": 2,
    "expert_nbytes": 4096,
    "routing": "texts",
    "prompt_tokens": 6,
    "steps": 4,
    "machine": {
        "gpu": "G",
        "cpu_cores": 2,
        "python": "3.12.1",
        "date": "2026-11-30",
        "versions": {"torch": "2.11.0", "vllm": None},
    },
    "rows": [
        {"capacity": None, "batch": 1, "load_seconds": 1.0, "warm": PART},
        {
            "capacity": 4,
            "batch": 1,
            "load_seconds": 1.0,
            "verified": True,
            "cold": PART,
            "warm": PART,
            "groups": [{"name": "code", "hit_rate": 0.25}],
        },
        {"capacity": 5, "batch": 1, "load_seconds": 1.0, "verified": False},
    ],
}
ROWS = [
    {
        "trace": "t",
        "batch": 1,
        "capacity": 4,
        "policy": "lru",
        "hit_ratio": 0.5,
        "gap_to_belady_closed": -0.5,
        "miss_bytes": 4096,
        "est_ms_per_token": 0.5,
    }
]
PAGES = {
    "run": (run_data(), lambda data: run_page(Fields("f", data))),
    "bench": (BENCH, lambda data: bench_page(Fields("f", data))),
    "rows": (
        ROWS,
        lambda data: rows_page([Fields("f", row, f"[{n}]") for n, row in enumerate(data)]),
    ),
}
numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
values = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.text(),
    st.just(EVIL),
    st.just([]),
    st.just({}),
    st.just([1]),
    st.just([{}]),
    st.just({"a": 1}),
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every field of a document."""
    inside: Any = ()
    if isinstance(data, dict | list):
        inside = data.items() if isinstance(data, dict) else enumerate(data)
    return [path] * bool(path) + [p for key, value in inside for p in places(value, (*path, key))]


@pytest.mark.parametrize("kind", PAGES)
def test_a_whole_document_has_a_page(kind: str) -> None:
    data, page = PAGES[kind]
    assert_needs_nothing(checked(page(data).render("").decode()))


@pytest.mark.parametrize("kind", PAGES)
@given(draw=st.data())
def test_any_value_anywhere_is_shown_or_refused(kind: str, draw: st.DataObject) -> None:
    data, page = PAGES[kind]
    data = copy.deepcopy(data)
    *path, last = draw.draw(st.sampled_from([p for p in places(data) if isinstance(p[-1], str)]))
    holder = data
    for key in path:
        holder = holder[key]
    holder[last] = draw.draw(values)
    refused = ""
    try:
        found = page(data).render("").decode()
    except FieldError as error:
        found, refused = "", str(error)
    assert (found == "") == refused.startswith("f: ")
    assert "nan" not in re.sub(r">[^<]*<", "", found), "in a drawing"
    assert_needs_nothing(checked(found))


@given(content=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_any_bytes_are_fields_or_an_error(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "x.json"
    path.write_bytes(content)
    said = str(path)
    try:
        read_fields(path)
    except FieldError as error:
        said = str(error)
    assert said.startswith(str(path))


def test_a_value_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"a": {"b": [{"c": 1}, {}]}}))
    data = read_fields(path)
    assert isinstance(data, Fields)
    first, second = data.part("a").parts("b")
    assert first.count("c") == 1
    with pytest.raises(FieldError, match=r"x\.json: field 'a\.b\[1\]\.c': missing"):
        second.count("c")
