"""The messages are what the errors say when they are raised, and each has its remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import messages as reader
import remedies
import troubleshooting
from hotexperts.config import parse_bytes, parse_cache_size
from hotexperts.errors import ExpertCacheOverflow, HotExpertsError
from hotexperts.registry import Registry
from hotexperts.simulate import read_trace
from hotexperts.sizing import LayerShape, capacity_for_budget, fixed_capacity
from places import fixed

FOUND = reader.messages()
PASSED_ON = {  # with a place before the words of an error that has its own line
    "cli.record": {"ConfigError"},
    "plain_file": {"OSError"},
    "simulate.sweep": {"ConfigError", "TraceError"},
}


def is_said(message: str) -> bool:
    """Whether one of the messages is this one, with values in its places."""
    telling = [said.text for said in FOUND if len(fixed(said.text)) > len(message) / 2]
    return any(re.fullmatch(re.sub("<.*?>", ".+?", re.escape(t)), message) for t in telling)


def trace_in(folder: Path, line: str) -> None:
    (folder / "t.jsonl").write_text(line + "\n")
    read_trace(folder / "t.jsonl")


def overflow() -> None:
    raise ExpertCacheOverflow(48, 32)


FAULTS = {
    "constants": lambda _: parse_bytes("6 parsecs"),
    "a number": lambda _: parse_cache_size(0),
    "places": lambda _: fixed_capacity(9, [LayerShape(8, 2, 1000)]),
    "a function's words": lambda _: capacity_for_budget(100, 0, [LayerShape(8, 2, 1000)]),
    "a registry": lambda _: Registry("policy", object, {"lru": "a:b"}).load("mru"),
    "the class's own": lambda _: overflow(),
    "a caller's": lambda folder: trace_in(folder, '{"token": 0, "layer": 3, "experts": [5, 5]}'),
    "another caller's": lambda folder: trace_in(folder, '{"token": 0, "layer": 3, "experts": 1}'),
    "a constant of a caller's": lambda folder: trace_in(folder, "[]"),
}


@pytest.mark.parametrize("fail", FAULTS.values(), ids=FAULTS)
def test_what_is_raised_is_among_the_messages(
    fail: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(HotExpertsError) as caught:
        fail(tmp_path)
    said = str(caught.value)
    assert is_said(said.removeprefix(f"{tmp_path / 't.jsonl'}: ")), said
    assert not is_said(said + " perhaps")


def test_values_become_places_and_words_stay(tmp_path: Path) -> None:
    (tmp_path / "errors.py").write_text(
        "class HotExpertsError(Exception): ...\nclass Bad(HotExpertsError): ...\n"
    )
    (tmp_path / "a.py").write_text(
        "from hotexperts.errors import Bad\n"
        "KNOWN = ('x', 'y')\n"
        "_MEND = {'size': 'give less', 'name': 'give another one'}\n"
        "def check(size, name):\n"
        "    if size: raise Bad(f'{name!r} of {len(size)}: use {\", \".join(KNOWN)}')\n"
        "    for key, remedy in _MEND.items():\n"
        "        raise Bad(f'{key} is wrong: {remedy}')\n"
        "    refuse('too long: cut it' if size else 'empty: write it')\n"
        "def refuse(why): raise Bad(f'{why}.')\n"
        "def other(): raise ValueError('not ours')\n"
    )
    assert [(said.module, said.error, said.text) for said in reader.messages(tmp_path)] == [
        ("a", "Bad", "<name> of <number of size>: use x, y"),
        ("a", "Bad", "size is wrong: give less"),
        ("a", "Bad", "name is wrong: give another one"),
        ("a", "Bad", "too long: cut it."),
        ("a", "Bad", "empty: write it."),
    ]


def test_every_error_of_the_source_is_read() -> None:
    raised = re.compile(r"raise (\w+)\(")
    for path in reader.FOLDER.rglob("*.py"):
        module = ".".join(path.relative_to(reader.FOLDER).with_suffix("").parts)
        errors = {name for name in raised.findall(path.read_text()) if name.endswith("Error")}
        ours = errors - {"ValueError", "TypeError", "AttributeError", "ModuleNotFoundError"}
        found = {said.error for said in FOUND if said.module == module.removesuffix(".__init__")}
        assert ours <= found | PASSED_ON.get(module, set()), module


def test_every_message_has_an_area_and_a_remedy_and_no_remedy_is_left_over() -> None:
    for said in FOUND:
        assert troubleshooting.area_of(said).title
        what, todo = troubleshooting.split(said)
        assert fixed(what).strip()
        assert todo
    assert set(remedies.MESSAGES) <= {said.text for said in FOUND}
    assert set(remedies.MODULES) <= {said.module for said in FOUND}


def test_a_message_without_a_remedy_is_refused() -> None:
    said = reader.Message("cli.run", "ConfigError", "the moon is full")
    with pytest.raises(LookupError, match="what to do about this"):
        troubleshooting.split(said)
    with pytest.raises(LookupError, match="no area for moon"):
        troubleshooting.area_of(reader.Message("moon", "ConfigError", "it is full"))


def test_the_page_is_up_to_date() -> None:
    assert troubleshooting.PAGE.read_text() == troubleshooting.page(), (
        "run python tools/troubleshooting.py"
    )
