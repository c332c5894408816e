"""What comes from outside is read or refused with an error of our own, whatever its bytes are.

Each parser gets what it accepts, damaged at random: bytes changed, lost, doubled or put in between,
and values of JSON replaced. Afterwards what was read must work as well.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hotexperts.config import parse_bytes, parse_cache_size
from hotexperts.errors import ConfigError, HotExpertsError
from hotexperts.fields import read_fields
from hotexperts.integrations.vllm.options import from_additional_config
from hotexperts.plan.source import read_facts
from hotexperts.policy import POLICIES
from hotexperts.serve.gate import Gate, Limits
from hotexperts.serve.refusal import Refusal
from hotexperts.serve.requests import CHAT, COMPLETIONS, parse
from hotexperts.simulate import Trace, replay
from hotexperts.simulate.files import read_trace, write_trace
from plan.test_plan import CONFIG

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([1.5, -0.0, 1e308, float("inf"), float("nan"), 2**31, 2**63, 10**30, -(2**63)]),
    st.sampled_from(["", "a", "\0", "\ud800", "9" * 50, [], [[]], {}, {"a": 1}, [1, 2], [None]]),
)
PIECES = [b'"', b"{", b"[", b"}", b",", b"NaN", b"9" * 5000, b"[" * 3000, b"\xff" * 8, b"\0" * 8]
fuzzed = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def damaged(draw: st.DrawFn, source: bytes) -> bytes:
    """The bytes after some accidents."""
    found = bytearray(source)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(found)))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            found[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == 1:
            del found[at : at + draw(st.integers(1, 40))]
        elif kind == 2:
            found[at:at] = found[at : at + draw(st.integers(1, 40))]
        elif kind == 3:
            piece = draw(st.sampled_from(PIECES))
            found[at : at + (8 if len(piece) == 8 else 0)] = piece
        else:
            found[at : at + 8] = draw(st.integers(0, 2**63)).to_bytes(8, "little")
    return bytes(found)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """The value with one of its parts replaced, lost or put in."""
    if draw(st.integers(0, 4)) == 0 or not isinstance(value, dict | list) or not value:
        return draw(JUNK)
    found: Any = value.copy()
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
    what = draw(st.integers(0, 5))
    if what == 0:
        del found[key]
    elif what == 1 and isinstance(found, dict):
        found[draw(st.sampled_from(["x", "", "\ud800"]))] = draw(JUNK)
    else:
        found[key] = draw(changed(value[key]))
    return found


def raises_ours(call: Callable[..., Any], *arguments: Any) -> Any:
    """What the call gives; None where it refuses."""
    try:
        return call(*arguments)
    except (HotExpertsError, Refusal):
        return None


def a_trace() -> Trace:
    ids = np.add.outer(np.arange(6), np.arange(8)).reshape(6, 2, 4) % 9
    phase, seq = np.array([0, 0, 1, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    return Trace(ids, phase, seq, {"n_experts": 9})


@pytest.mark.parametrize("suffix", [".npz", ".jsonl", ".csv"])
def test_traces(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    if suffix == ".csv":
        path.write_text("token,layer,experts\n0,0,1 2\n0,1,3 4\n1,0,5 6\n")
    else:
        write_trace(a_trace(), path)
    source = path.read_bytes()
    assert read_trace(path).num_experts == (7 if suffix == ".csv" else 9)

    @fuzzed
    @given(damaged(source))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        trace = raises_ours(read_trace, path)
        if trace is not None and trace.num_experts < 1000:
            replay(trace, "lru", 2, 1)

    check()


def test_a_trace_that_unpacks_to_more_than_any_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotexperts.simulate.arrays._MOST_NBYTES", 10_000)
        zeros = np.zeros((2000, 2, 4), np.int32)  # a few hundred bytes, packed
        np.savez_compressed(path, ids=zeros, phase=zeros[:, 0, 0], seq=zeros[:, 0, 0])
        assert path.stat().st_size < 5000
        with pytest.raises(HotExpertsError, match=r"ids\.npy takes 64128 bytes unpacked"):
            read_trace(path)


@pytest.mark.parametrize("name", POLICIES.names())
def test_states_of_policies(name: str) -> None:
    from policy.replay import Replay
    from policy.test_state import fresh

    before = Replay(name, 3)
    before.calls("A B AC D E A B F")
    state = json.loads(json.dumps(before.policy.state()))
    policy = fresh(name)

    @fuzzed
    @given(changed(state))
    def check(value: Any) -> None:
        raises_ours(policy.restore, value)

    check()


@pytest.mark.parametrize("mode", ["host", "device"])
def test_state_files(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from cache.test_warm_start import ABOUT, make, serve, slots_of
    from hotexperts.cache import warm_start

    path, about = tmp_path / "state", replace(ABOUT, mode=mode)
    before = make(mode)
    serve(before, 0, 4)
    warm_start.save(path, {"a": before}, about)
    source = path.read_bytes()
    provider = make(mode)

    @fuzzed
    @given(st.one_of(damaged(source), changed(json.loads(source)).map(lambda v: as_json(v))))
    @example(source)
    def check(data: bytes) -> None:
        path.write_bytes(data)
        provider.reset()
        raises_ours(warm_start.load, path, {"a": provider}, about)
        assert set(slots_of(provider)) in ({-1}, set(slots_of(before)))

    check()
    serve(provider, 1, 2)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def with_length(header: bytes, data: bytes = bytes(22)) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


EXPERT = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HEADER = {
    "__metadata__": {"format": "pt"},
    **{f"model.layers.{n}.mlp.experts.0.w": EXPERT for n in range(2)},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
}


@fuzzed
@given(
    st.one_of(damaged(with_length(as_json(HEADER))), changed(HEADER).map(as_json).map(with_length))
)
def test_headers_of_safetensors(data: bytes) -> None:
    from tempfile import TemporaryDirectory

    from hotexperts.cache.safetensors_file import SafetensorsFile

    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(data)
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG | {"num_experts": 1}))
        file = raises_ours(SafetensorsFile, path)
        for name in file.entries if file is not None else ():
            raises_ours(file.tensor, name)
        raises_ours(read_facts, folder)


@fuzzed
@given(changed(CONFIG), changed({"weight_map": {"a": "model.safetensors"}}))
@example(CONFIG, {"weight_map": {"a": "x" * 5000 + ".safetensors"}})
@example(CONFIG, {"weight_map": {"a": "x\0.safetensors"}})
def test_configurations(config: Any, index: Any) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        (Path(folder) / "model.safetensors").write_bytes(with_length(as_json(HEADER)))
        raises_ours(read_facts, folder)
        (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
        raises_ours(read_facts, folder)


PACKED = {
    "gptq": {"bits": 4, "group_size": 8, "desc_act": False, "checkpoint_format": "gptq"},
    "awq": {"bits": 4, "group_size": 8, "version": "gemm"},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "group_size": 8}}},
    },
}
PACKED_SHAPES = {  # of eight outputs and sixteen inputs
    "gptq": {"qweight": [2, 8], "qzeros": [2, 1], "scales": [2, 8], "g_idx": [16]},
    "awq": {"qweight": [16, 1], "qzeros": [2, 1], "scales": [2, 8]},
    "compressed-tensors": {"weight_packed": [8, 2], "weight_scale": [8, 2], "weight_shape": [2]},
}


@pytest.mark.parametrize("method", PACKED)
def test_packed_weights(method: str) -> None:
    """The configuration, the tensors' shapes and their bytes."""
    pytest.importorskip("transformers")
    from tempfile import TemporaryDirectory
    from types import SimpleNamespace

    from hotexperts.integrations.transformers.plain_view import ATTRIBUTE, open_files

    def read(config: Any, shapes: Any, byte: int) -> Any:
        header, end = {}, 0
        for name, shape in shapes.items():
            is_scale, begin = name.endswith(("scales", "scale")), end
            end += int(np.prod(shape)) * (2 if is_scale else 4)
            about = {"dtype": "F16" if is_scale else "I32", "data_offsets": [begin, end]}
            header[f"m.{name}"] = {**about, "shape": shape}
        content = bytearray([byte] * end)
        if "weight_shape" in shapes and byte < 128 and shapes["weight_shape"] == [2]:
            content[-8:] = np.array([8, 16], dtype=np.int32).tobytes()
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            path.write_bytes(with_length(as_json(header), content))
            model = SimpleNamespace(config=SimpleNamespace(**{ATTRIBUTE: config}))
            found = raises_ours(open_files, model, [path])
            weight = found.file_of.get("m.weight") if found is not None else None
            return weight and raises_ours(weight.tensor, "m.weight")

    shapes = PACKED_SHAPES[method]
    config = {"quant_method": method, **PACKED[method]}
    assert read(config, shapes, 0).shape == (8, 16)
    other_sizes = st.sampled_from(sorted(shapes)).flatmap(
        lambda name: st.lists(st.integers(0, 17), max_size=3).map(lambda s: {**shapes, name: s})
    )

    @fuzzed
    @given(changed(PACKED[method]), other_sizes, st.integers(0, 255))
    def check(values: Any, sizes: Any, byte: int) -> None:
        if isinstance(values, dict):
            read({**values, "quant_method": method}, shapes, byte)
        read(config, sizes, byte)
        read(config, shapes, byte)

    check()


def test_headers_of_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from plan.test_gguf import save

    path = save(tmp_path / "m.gguf")
    source = path.read_bytes()

    @fuzzed
    @given(damaged(source[:1500]))
    def check(head: bytes) -> None:
        path.write_bytes(head + source[1500:])
        raises_ours(read_facts, path)

    check()


OPTIONS = {
    "size": 4,
    "policy": "lru",
    "options": {"prefill_tokens": 4, "self_test": True, "state": "x", "trace": "y.npz"},
}


@fuzzed
@given(changed(OPTIONS), damaged(as_json(OPTIONS["options"])))
@example([], b"[" * 100_000)
@example(3, b"9" * 5000)
@example({"size": 4, "options": {"state": "x" * 5000}}, b"{}")
@example({"size": 4, "options": {"trace": "x\0y"}}, b"{}")
def test_options(value: Any, text: bytes) -> None:
    raises_ours(from_additional_config, {"hotexperts": value})
    raises_ours(
        from_additional_config, {"hotexperts": {"size": 4, "options": text.decode("latin1")}}
    )


def test_true_is_no_number_of_tokens() -> None:
    with pytest.raises(ConfigError, match="prefill_tokens is True: give at least 1 token"):
        from_additional_config({"hotexperts": {"size": 4, "options": {"prefill_tokens": True}}})
    with pytest.raises(ConfigError, match=r"additional_config\['hotexperts'\] is \[\]: give an"):
        from_additional_config({"hotexperts": []})


@pytest.mark.parametrize("name", ["x" * 5000, "x\0y", "\ud800", "..", "/", "", "~", "a/b/c"])
def test_names_of_models(name: str) -> None:
    with pytest.raises(HotExpertsError):
        read_facts(name)


@fuzzed
@given(st.one_of(*(damaged(text) for text in (b"6GiB", b"12", b"auto", b"1.5 GB"))), JUNK)
def test_sizes(text: bytes, value: Any) -> None:
    raises_ours(parse_bytes, text.decode("latin1"))
    raises_ours(parse_cache_size, text.decode("latin1"))
    raises_ours(parse_cache_size, value)


@fuzzed
@given(damaged(b'{"a": 1, "b": [{"c": 2}]}'))
def test_json_that_others_wrote(data: bytes) -> None:
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        raises_ours(read_fields, Path(file.name))


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHATS = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "temperature": 0.5,
    "stop": ["a"],
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"a": 1},
}
TEXTS = {"model": "m", "prompt": "x", "max_tokens": 5, "seed": 3, "logit_bias": {}, "n": 1}


@pytest.mark.parametrize(("path", "body"), [(CHAT, CHATS), (COMPLETIONS, TEXTS)])
def test_bodies_of_requests(path: str, body: dict[str, Any]) -> None:
    assert parse(path, as_json(body), "m")[0]["model"] == "m"

    @fuzzed
    @given(st.one_of(damaged(as_json(body)), changed(body).map(as_json)))
    def check(data: bytes) -> None:
        found = raises_ours(parse, path, data, "m")
        if found is not None:
            json.dumps(found[0]).encode()

    check()


HEADERS = {"host": b"h", "authorization": b"Bearer k", "content-type": b"application/json"}


@fuzzed
@given(
    st.sampled_from(["GET", "POST", "PUT", "\x00"]),
    st.sampled_from(["/health", CHAT, COMPLETIONS, "/v1/models/..%2f", "/\x00", "/v1/", ""]),
    st.one_of(*(st.tuples(st.just(n), damaged(v)) for n, v in HEADERS.items())),
    st.one_of(st.none(), damaged(b"10")),
    damaged(as_json(TEXTS)),
)
@example("POST", COMPLETIONS, ("x", b""), "²".encode("latin1"), b"{}")
@example("POST", COMPLETIONS, ("x", b""), b"9" * 5000, b"{}")
@example("POST", COMPLETIONS, ("x", b""), b"-1", b"{}")
def test_requests_get_an_answer(
    method: str, path: str, other: tuple[str, bytes], length: bytes | None, body: bytes
) -> None:
    headers = {**HEADERS, other[0]: other[1], **({"content-length": length} if length else {})}
    sent = asyncio.run(_answer(method, path, headers, body))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert 200 <= sent[0]["status"] < 500


async def _answer(
    method: str, path: str, headers: dict[str, bytes], body: bytes
) -> list[dict[str, Any]]:
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await asyncio.sleep(60)
        raise AssertionError("nobody waits as long")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value) for name, value in headers.items()],
    }
    await Gate(app, Limits("m", 2000, 2, "k", frozenset({"h"})))(scope, receive, send)
    return sent


def test_the_length_of_a_body_is_a_number() -> None:
    headers = {**HEADERS, "content-length": b"1_0"}
    start, body = asyncio.run(_answer("POST", COMPLETIONS, headers, as_json(TEXTS)))
    assert start["status"] == 400
    assert (
        "Content-Length is '1_0': give a number of bytes"
        in json.loads(body["body"])["error"]["message"]
    )


def test_true_is_no_slot() -> None:
    from hotexperts.errors import CheckpointError
    from hotexperts.residency import Residency

    ledger = Residency(4, 2)
    with pytest.raises(CheckpointError, match="expert 1 in slot True of 2"):
        ledger.restore([-1, True, -1, -1])
    assert ledger.slot_of == [-1] * 4
