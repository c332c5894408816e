"""A trace that is appended token by token is the trace that is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotexperts.simulate import Trace, TraceError, read_trace
from hotexperts.simulate.writer import TraceWriter, check_out

META = {"model": "none", "expert_nbytes": 7, "source": "a test", "licence": "none needed"}


def drawn(num_experts: int, *, num_tokens: int = 20) -> Trace:
    rng = np.random.default_rng(0)
    ids = rng.random((num_tokens, 3, num_experts)).argsort(axis=2)[..., :4]
    ids[5, 1, 2:] = -1
    phase, seq = rng.integers(0, 2, num_tokens), np.sort(rng.integers(0, 4, num_tokens))
    return Trace(ids, phase, seq)


@pytest.mark.parametrize(("num_experts", "kind"), [(255, "uint8"), (256, "uint16")])
def test_reading_gives_what_was_appended(num_experts: int, kind: str, tmp_path: Path) -> None:
    trace, path = drawn(num_experts), tmp_path / "t.npz"
    with TraceWriter(path, num_experts, META) as writer:
        writer.append(trace.ids[0], trace.phase[0], trace.seq[0])
        writer.append(trace.ids[1:8], trace.phase[1:8], trace.seq[1:8])
        writer.append(trace.ids[8:], trace.phase[8:], trace.seq[8:])
        assert not path.exists(), "nothing under its name before it is whole"
        assert writer.num_tokens == 20
    found = read_trace(path)
    for name in ("ids", "phase", "seq"):
        assert np.array_equal(getattr(found, name), getattr(trace, name)), name
    assert found.meta == {**META, "n_experts": num_experts, "k": 4}
    assert np.load(path)["ids"].dtype == kind
    assert [file.name for file in tmp_path.iterdir()] == ["t.npz"]


def test_logits_and_guesses_lie_beside_the_ids(tmp_path: Path) -> None:
    trace, path = drawn(16), tmp_path / "t.npz"
    logits = np.random.default_rng(1).random((20, 3, 16), dtype=np.float32)
    guesses = trace.ids[..., :2]
    with TraceWriter(path, 16, {}) as writer:
        for at in range(20):
            row = {"logits": logits[at], "guesses": guesses[at]}
            writer.append(trace.ids[at], trace.phase[at], trace.seq[at], **row)
    found = np.load(path)
    assert np.array_equal(found["logits"], logits)
    assert np.array_equal(found["guesses"], np.where(guesses < 0, 255, guesses))
    assert np.array_equal(read_trace(path).ids, trace.ids)


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(b"old")
    with pytest.raises(TraceError, match="only once"), TraceWriter(path, 8, {}) as writer:
        writer.append([[[0, 1]], [[2, 2]]], 1, 0)
    assert path.read_bytes() == b"old"
    with pytest.raises(TraceError, match="nothing was recorded"), TraceWriter(path, 8, {}):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["t.npz"]
    with TraceWriter(path, 8, {}) as writer:
        writer.append([[0, 1]], 1, 0)
    assert read_trace(path).ids.tolist() == [[[0, 1]]]
    with pytest.raises(TraceError, match="closed"):
        writer.append([[0, 1]], 1, 0)
    writer.close()


def test_an_append_that_is_broken_off_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.npz"
    writer = TraceWriter(path, 8, {})
    writer.append([[0, 1]], 1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(writer._arrays["seq"], "add", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.append([[2, 3]], 1, 0)
    writer.close()
    assert read_trace(path).ids.tolist() == [[[0, 1]]]


def _interrupt(rows: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("ids", "more", "message"),
    [
        ([[1, 8]], {}, "field 'n_experts': 8, but 'ids' holds 8"),
        ([[1, 1]], {}, "only once a layer"),
        ([[1.5, 2]], {}, "give integers"),
        ([[1, 2], [3, 4]], {}, "after tokens of"),
        ([[1, 2]], {"logits": [[0.0] * 8]}, "after tokens of"),
        ([[1, 2]], {"guesses": [[1, 8]]}, "but 'ids' holds 8"),
        ([[1, 2]], {"guesses": [[1, 2], [3, 4]]}, "give one row for each of the (1, 1) tokens"),
    ],
)
def test_a_token_that_does_not_fit(
    ids: object, more: dict[str, object], message: str, tmp_path: Path
) -> None:
    with TraceWriter(tmp_path / "t.npz", 8, {}) as writer:
        writer.append([[0, 1]], 1, 0)
        with pytest.raises(TraceError) as caught:
            writer.append(ids, 1, 0, **more)
        assert message in str(caught.value)
    assert len(read_trace(tmp_path / "t.npz").ids) == 1


def test_a_link_stays_and_its_trace_is_written_where_it_leads(tmp_path: Path) -> None:
    target, link = tmp_path / "large" / "b.npz", tmp_path / "a.npz"
    link.symlink_to(target)
    with pytest.raises(TraceError, match="no such folder"):  # not after a long recording
        TraceWriter(link, 8, {})
    target.parent.mkdir()
    for experts in ([[0, 1]], [[2, 3]]):
        with TraceWriter(link, 8, {}) as writer:
            writer.append(experts, 1, 0)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert read_trace(target).ids.tolist() == [experts]
        assert list(target.parent.iterdir()) == [target]


def test_names_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.npz").mkdir()
    for name, message in (
        ("t.jsonl", "end the name in .npz"),
        ("nowhere/t.npz", "no such folder"),
        ("d.npz", "a folder is there: name a file"),
    ):
        with pytest.raises(TraceError, match=message):
            check_out(tmp_path / name)
        with pytest.raises(TraceError, match=message):
            TraceWriter(tmp_path / name, 8, {})

    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(TraceError, match=r"cannot be written \(Permission denied\): make room"):
        check_out(tmp_path / "t.npz")


def test_a_trace_so_far_is_whole_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.npz"
    with TraceWriter(path, 8, {}) as writer:
        for token in range(3):
            writer.append([[token, 7]], 1, 0)
            writer.save()
            assert read_trace(path).ids.tolist() == [[[i, 7]] for i in range(token + 1)]
            assert [file.name for file in tmp_path.iterdir()] == ["t.npz"]
        saved_at = path.stat().st_mtime_ns
    assert path.stat().st_mtime_ns == saved_at, "the end has nothing more to write"
    with TraceWriter(path, 8, {}) as writer:
        writer.append([[0, 1]], 1, 0)
        write = writer._write

        def while_another_appends(partial: Path, num_tokens: int) -> None:
            writer.append([[4, 5]], 1, 0)
            write(partial, num_tokens)

        with monkeypatch.context() as patch:
            patch.setattr(writer, "_write", while_another_appends)
            writer.save()
        assert read_trace(path).ids.tolist() == [[[0, 1]]]
    assert read_trace(path).ids.tolist() == [[[0, 1]], [[4, 5]]]
