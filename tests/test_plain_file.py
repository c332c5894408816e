"""Whatever is opened by a name that a user gave is a plain file: a pipe would be waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hotexperts.bench.earlier import read_earlier
from hotexperts.bench.routing import find_routing
from hotexperts.bench.shapes import find_shape
from hotexperts.cache.mapped_file import MappedFile
from hotexperts.cache.pack_format import PackHeader, is_pack
from hotexperts.cache.pack_source import SourceFile
from hotexperts.cli.main import main
from hotexperts.errors import HotExpertsError
from hotexperts.gguf_header import read_header as read_gguf
from hotexperts.observe import files as counter_files
from hotexperts.plain_file import other_than_file, plain
from hotexperts.plan.config import read_config
from hotexperts.safetensors_header import read_header
from hotexperts.simulate import Trace, read_trace, write_trace


@pytest.fixture
def pipe(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a pipe of a name, which nobody else opens."""

    def make(name: str) -> Path:
        os.mkfifo(tmp_path / name)
        return tmp_path / name

    return make


def test_what_is_there_is_named(tmp_path: Path, pipe: Callable[[str], Path]) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "link").symlink_to(pipe("pipe"))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
    for name, kind in (
        ("file", None),
        ("nothing", None),
        ("file/in", None),
        ("pipe", "a pipe"),
        ("link", "a pipe"),
        ("socket", "a socket"),
        (".", "a folder"),
        ("/dev/null", "a device"),
        ("x" * 300, None),
    ):
        assert other_than_file(tmp_path / name) == kind, name
    assert plain(file) == file
    with pytest.raises(IsADirectoryError, match="a folder is there, and a file was wanted"):
        plain(tmp_path)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.npz", read_trace),
        ("a.jsonl", read_trace),
        ("a.csv", read_trace),
        ("a.json", read_earlier),
        ("a.npz", lambda path: find_routing(path, find_shape("OLMoE-1B-7B", 1)[1], 4)),
        ("a.safetensors", read_header),
        ("a.safetensors", MappedFile),
        ("a.safetensors", SourceFile.of),
        ("config.json", read_config),
        ("a.gguf", read_gguf),
        ("a.pack", PackHeader.read),
        ("a.pack", is_pack),
    ],
)
def test_a_pipe_is_not_waited_for(
    name: str, read: Callable[[Path], object], pipe: Callable[[str], Path]
) -> None:
    with pytest.raises(HotExpertsError, match="a pipe is there"):
        read(pipe(name))


def test_no_trace_is_written_into_a_pipe(pipe: Callable[[str], Path]) -> None:
    with pytest.raises(HotExpertsError, match="a pipe is there: name a file"):
        write_trace(Trace([[[0, 1]]], [1], [0], {}), pipe("a.npz"))


@pytest.mark.parametrize(
    "words",
    [
        ("trace", "--out", "t.npz", "--prompts", "PIPE"),
        ("serve", "--chat-template", "PIPE"),
        ("bench", "--compare", "PIPE"),
        ("simulate", "PIPE"),
        ("simulate", "t.npz", "--json", "PIPE"),
        ("simulate", "t.npz", "--plot", "PIPE"),
        ("report", "PIPE", "--out", "t.html"),
        ("trace", "--synthetic", "uniform", "--out", "PIPE"),
    ],
    ids=" ".join,
)
def test_commands_name_the_pipe(
    words: tuple[str, ...], pipe: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = pipe("pipe.npz" if words[-2:-1] != ("--plot",) else "pipe.html")
    assert main([str(path) if word == "PIPE" else word for word in words]) == 2
    assert "a pipe is there" in capsys.readouterr().err


def test_a_pipe_among_counters_is_left_out(
    pipe: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(counter_files, "_folder", lambda: tmp_path)
    counter_files.write_counters(counter_files.counter_file("x", 1), {"layer": {"hits": 2}})
    pipe("hotexperts-x-0.json")
    assert counter_files.read_counters("x") == {1: {"layer": {"hits": 2}}}
