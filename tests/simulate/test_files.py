"""Trace files: read, written and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotexperts.errors import HotExpertsError
from hotexperts.simulate import Trace, TraceError, read_trace, write_trace

GOOD = '{"token": 0, "layer": 0, "experts": [1, 2]}\n'


def same(one: Trace, other: Trace) -> bool:
    names = ("ids", "phase", "seq")
    equal = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
    return equal and one.meta == other.meta


def arrays(**changes: object) -> dict[str, np.ndarray]:
    """An .npz of 2 tokens, 1 layer and 2 experts a token, with changes; None leaves one out."""
    found = {"ids": np.array([[[0, 1]], [[1, 255]]], np.uint8), "phase": np.array([0, 1])}
    found |= {"seq": np.zeros(2, int), **changes}
    return {name: np.asarray(value) for name, value in found.items() if value is not None}


@pytest.mark.parametrize("suffix", [".npz", ".jsonl"])
@pytest.mark.parametrize("highest", [7, 255, 65_534])
def test_what_is_written_is_read(tmp_path: Path, suffix: str, highest: int) -> None:
    ids = [[[0, 1], [-1, -1]], [[highest, 3], [2, -1]], [[0, 5], [2, 3]]]
    trace = Trace(np.array(ids), np.array([0, 1, 1]), np.array([4, 4, 0]), {"model": "m"})
    write_trace(trace, tmp_path / f"t{suffix}")
    assert same(read_trace(tmp_path / f"t{suffix}"), trace)
    assert trace.num_experts == highest + 1


def test_arrays_by_token(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **arrays(meta='{"n_experts": 16}'), weights=np.ones(3))
    trace = read_trace(str(tmp_path / "t.npz"))
    assert trace.ids.tolist() == [[[0, 1]], [[1, -1]]]
    assert (trace.num_layers, trace.num_experts) == (1, 16)
    assert trace.phase.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        trace.ids[0] = 3


def test_arrays_by_sequence_and_position(tmp_path: Path) -> None:
    ids = np.arange(2 * 130 * 3 * 2).reshape(2, 130, 3, 2).astype(np.int16)
    np.savez(tmp_path / "t.npz", ids=ids)
    trace = read_trace(tmp_path / "t.npz")
    assert trace.ids.shape == (260, 3, 2)
    assert np.flatnonzero(trace.phase).tolist() == [128, 129, 258, 259]
    assert [len(sequence) for sequence in trace.sequences()] == [130, 130]
    assert trace.ids[130].tolist() == ids[1, 0].tolist()


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"meta": {"n_experts": 8}}\n'
        '{"token": 7, "layer": 1, "experts": [3], "phase": "decode", "seq": 2}\n\n'
        '{"token": 5, "layer": 0, "experts": [4, 0], "phase": "prefill", "seq": 2}\n'
    )
    trace = read_trace(path)
    assert trace.ids.tolist() == [[[4, 0], [-1, -1]], [[-1, -1], [3, -1]]]
    assert (trace.phase.tolist(), trace.seq.tolist()) == ([0, 1], [2, 2])
    assert trace.num_experts == 8


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\ufefftoken,layer,experts\n0,0,3 1\n\n0,1,2\n1,0,1 0\n")
    trace = read_trace(tmp_path / "t.csv")
    assert trace.ids.tolist() == [[[3, 1], [2, -1]], [[1, 0], [-1, -1]]]
    assert (trace.phase.tolist(), trace.seq.tolist()) == ([1, 1], [0, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no event"),
        ("{", "line 1, field 'event': not JSON"),
        ("[" * 100_000, "line 1, field 'event': not JSON"),
        (GOOD + "[]", "line 2, field 'event': give a JSON object"),
        ('{"meta": 3}', "line 1, field 'meta'"),
        (GOOD + '{"meta": {}}', "line 2, field 'experts': missing"),
        (GOOD.replace("layer", "lair"), "line 1, field 'lair': unknown"),
        (GOOD.replace("[1, 2]", "3"), "line 1, field 'experts': 3: give a list"),
        (GOOD.replace("[1, 2]", "[]"), "line 1, field 'experts': .*one id or more"),
        (GOOD.replace("[1, 2]", "[1, 1]"), "field 'experts': .*each once"),
        (GOOD.replace("[1, 2]", "[true]"), "field 'experts'"),
        (GOOD.replace("[1, 2]", "[-1]"), "field 'experts': .*0 to 65534"),
        (GOOD.replace("[1, 2]", '["\\ud800"]'), "field 'experts'"),
        (GOOD.replace("[1, 2]", f"[{'9' * 5000}]"), "line 1"),
        (GOOD.replace('"token": 0', '"token": 1.0'), "field 'token': 1.0"),
        (GOOD.replace('"layer": 0', '"layer": 1e9'), "field 'layer'"),
        (GOOD.replace('"layer": 0', '"layer": 99999'), "field 'layer': .*0 to 4095"),
        (GOOD.replace("}", ', "phase": "warm"}'), "field 'phase': 'warm'"),
        (GOOD.replace("}", ', "phase": []}'), "field 'phase'"),
        (GOOD.replace("}", ', "seq": null}'), "field 'seq': None"),
        (GOOD * 2, "line 2, field 'layer': token 0 has 0 already"),
        (GOOD + '{"token": 0, "layer": 1, "experts": [1], "seq": 1}', "line 2, field 'seq'"),
        ('{"meta": {"n_experts": 2}}\n' + GOOD, "field 'n_experts': 2, but 'ids' holds 2"),
        ('{"meta": {"n_experts": "8"}}\n' + GOOD, "field 'n_experts': '8'"),
    ],
)
def test_malformed_json_lines_are_refused(tmp_path: Path, text: str, message: str) -> None:
    refused(tmp_path / "t.jsonl", text, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, field 'header'"),
        ("token,experts\n", "line 1, field 'header': give token,layer,experts"),
        ("token,layer,experts\n", "no event"),
        ("token,layer,experts\n0,0\n", "line 2, field 'row': 2 columns"),
        ("token,layer,experts\n\n0\n", "line 3, field 'row': 1 columns"),
        ("token,layer,experts\n0,0,\n", "line 2, field 'experts'"),
        ("token,layer,experts\n0,0,1\n1,x,1\n", "line 3, field 'layer': 'x'"),
        ("token,layer,experts\n-1,0,1\n", "line 2, field 'token': '-1'"),
        ("token,layer,experts\n0,0,1 \N{FULLWIDTH DIGIT ONE}\n", "field 'experts'"),
        ("token,layer,experts\n0,0,1;2\n", "field 'experts': '1;2'"),
        ("token,layer,experts\n0,0," + "1" * 200_000, "line 2, field 'row'"),
    ],
)
def test_malformed_csv_is_refused(tmp_path: Path, text: str, message: str) -> None:
    refused(tmp_path / "t.csv", text, message)


def refused(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert isinstance(caught.value, HotExpertsError)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": None}, "array 'ids' is missing"),
        ({"phase": None}, "array 'phase' is missing"),
        ({"seq": None}, "array 'seq' is missing"),
        ({"ids": np.zeros((2, 1, 1))}, "'ids': float64 values"),
        ({"ids": np.zeros((2, 1), int)}, "shape"),
        ({"ids": np.zeros((2, 0, 1), int)}, "none of them 0"),
        ({"ids": np.zeros((3, 1, 1), int)}, "array 'phase': shape"),
        ({"ids": np.full((2, 1, 2), 255, np.uint8)}, "nothing is recorded"),
        ({"ids": np.array([[[0, 1]], [[2, 2]]])}, "'ids', token 1, layer 0: 2: .*only once"),
        ({"ids": np.array([[[0, 1]], [[-2, 2]]])}, "'ids', token 1, layer 0: -2"),
        ({"ids": np.array([[[0, 1]], [[2**40, 2]]])}, "32 bits"),
        ({"phase": [0, 2]}, "'phase', token 1: 2"),
        ({"phase": [0]}, "'phase': shape"),
        ({"seq": ["a", "b"]}, "'seq'"),
        ({"meta": "{"}, "'meta': not JSON"),
        ({"meta": "[]"}, "'meta': give a JSON object"),
        ({"ids": np.array([[[None]], [[1]]])}, "cannot be read as .npz"),
    ],
)
def test_malformed_arrays_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, **arrays(**changes))
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_what_is_no_archive_gives_no_advice_to_load_it_unsafely(tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_text("x")
    with pytest.raises(TraceError, match=r"no archive of plain arrays.: give the whole file"):
        read_trace(tmp_path / "t.npz")


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"ends in one of .npz, .jsonl, .csv"):
        read_trace(tmp_path / "t.parquet")
    with pytest.raises(TraceError, match=r"end it in .npz or .jsonl"):
        write_trace(Trace(np.zeros((1, 1, 1), int), np.ones(1, int), np.zeros(1, int)), "t.csv")
    for name in ("no.npz", "no.jsonl", "no.csv"):
        with pytest.raises(TraceError, match=f"{name}: cannot be read.*No such file"):
            read_trace(tmp_path / name)
    for name, content in {
        "text.npz": b"token,layer\n",
        "empty.npz": b"",
        "cut.npz": cut(tmp_path),
        "latin.jsonl": b"\xff",
        "latin.csv": b"\xff",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=f"{name}: cannot be read"):
            read_trace(tmp_path / name)
    with (tmp_path / "bare.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(TraceError, match="one bare array"):
        read_trace(tmp_path / "bare.npz")


def cut(folder: Path) -> bytes:
    np.savez(folder / "whole.npz", **arrays())
    return (folder / "whole.npz").read_bytes()[:300]
