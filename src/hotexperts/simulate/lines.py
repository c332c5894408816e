"""Traces as text: JSON lines with one event a line, and CSV with `token,layer,experts`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hotexperts.simulate.trace import (
    DECODE,
    MAX_CELLS,
    MAX_EXPERT,
    NOT_RECORDED,
    PREFILL,
    Trace,
    TraceError,
)

COLUMNS = ["token", "layer", "experts"]
PHASES = {"prefill": PREFILL, "decode": DECODE}
FIELDS = {*COLUMNS, "phase", "seq"}
MAX_LAYER = 4095
MAX_NUMBER = 2**31 - 1


class _Event(NamedTuple):
    """What one token asked of one layer, and the line that says so."""

    line: int
    token: int
    layer: int
    experts: tuple[int, ...]
    phase: int = DECODE
    seq: int = 0


def read_jsonl(path: Path) -> Trace:
    """One event a line, `{"token": 0, "layer": 3, "experts": [5, 1]}`, and `seq` and `phase`.

    `phase` is "prefill" or "decode" (if left out), `seq` a number (0 if left out). The first line
    may be `{"meta": {...}}` instead. Tokens are ordered by their number, which is unique in the
    file. Empty lines are skipped.
    """
    meta: dict[str, Any] = {}
    events: list[_Event] = []
    for line, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        value = _json_object(line, text)
        if not events and not meta and set(value) == {"meta"}:
            meta = _json_meta(line, value["meta"])
        else:
            events.append(_json_event(line, value))
    return _trace(events, meta)


def read_csv(path: Path) -> Trace:
    """The header `token,layer,experts`, then one event a line; experts are divided by spaces.

    All tokens are decode and of one sequence. Empty lines are skipped.
    """
    rows = csv.reader(_lines(path))
    try:
        if next(rows, None) != COLUMNS:
            raise _wrong(1, "header", f"give {','.join(COLUMNS)}")
        return _trace([_csv_event(rows.line_num, row) for row in rows if row], {})
    except csv.Error as error:
        raise _wrong(rows.line_num, "row", str(error)) from error


def write_jsonl(trace: Trace, path: Path) -> None:
    """Write the meta data, then every event that was recorded."""
    names = {number: name for name, number in PHASES.items()}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"meta": dict(trace.meta)}) + "\n")
        for token, layers in enumerate(trace.ids.tolist()):
            rest = {"seq": int(trace.seq[token]), "phase": names[int(trace.phase[token])]}
            for layer, ids in enumerate(layers):
                experts = [expert for expert in ids if expert != NOT_RECORDED]
                if experts:
                    event = {"token": token, "layer": layer, "experts": experts, **rest}
                    file.write(json.dumps(event) + "\n")


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot be read as text ({error}): give UTF-8") from error


def _json_object(line: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(line, "event", f"not JSON ({error}): give an object") from error
    if not isinstance(value, dict):
        raise _wrong(line, "event", "give a JSON object")
    return value


def _json_meta(line: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(line, "meta", "give a JSON object")
    return value


def _json_event(line: int, value: Mapping[str, Any]) -> _Event:
    for name in sorted(set(value) ^ FIELDS):
        if name in value:
            raise _wrong(line, name, f"unknown: give {', '.join(sorted(FIELDS))}")
        if name in COLUMNS:
            raise _wrong(line, name, "missing: give one")
    experts, phase = value["experts"], value.get("phase", "decode")
    if not isinstance(experts, list):
        raise _wrong(line, "experts", f"{experts!r:.60}: give a list of ids")
    if not isinstance(phase, str) or phase not in PHASES:
        raise _wrong(line, "phase", f"{phase!r:.60}: give 'prefill' or 'decode'")
    seq = _number(line, "seq", value.get("seq", 0), MAX_NUMBER)
    return _event(line, value["token"], value["layer"], experts, PHASES[phase], seq)


def _csv_event(line: int, row: list[str]) -> _Event:
    if len(row) != len(COLUMNS):
        raise _wrong(line, "row", f"{len(row)} columns: give {','.join(COLUMNS)}")
    token, layer = (_digits(line, name, row[at]) for at, name in enumerate(COLUMNS[:2]))
    experts = [_digits(line, "experts", text) for text in row[2].split()]
    return _event(line, token, layer, experts, DECODE, 0)


def _event(line: int, token: Any, layer: Any, experts: list[Any], phase: int, seq: int) -> _Event:
    token = _number(line, "token", token, MAX_NUMBER)
    layer = _number(line, "layer", layer, MAX_LAYER)
    ids = tuple(_number(line, "experts", expert, MAX_EXPERT) for expert in experts)
    if not ids or len(set(ids)) < len(ids):
        raise _wrong(line, "experts", f"{list(ids)!r:.60}: give one id or more, each once")
    return _Event(line, token, layer, ids, phase, seq)


def _digits(line: int, name: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_NUMBER))):
        raise _wrong(line, name, f"{text!r:.60}: give a number")
    return int(text)


def _number(line: int, name: str, value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        shown = "an integer" if isinstance(value, int) else f"{value!r:.60}"
        raise _wrong(line, name, f"{shown}: give a number from 0 to {most}")
    return value


def _trace(events: list[_Event], meta: Mapping[str, Any]) -> Trace:
    if not events:
        raise TraceError("no event: give one a line")
    row_of = {token: row for row, token in enumerate(sorted({event.token for event in events}))}
    top_k = max(len(event.experts) for event in events)
    shape = (len(row_of), max(event.layer for event in events) + 1, top_k)
    if shape[0] * shape[1] * shape[2] > MAX_CELLS:
        raise TraceError(
            f"{shape} tokens, layers and ids a token are over {MAX_CELLS} ids: give fewer tokens"
        )
    ids = np.full(shape, NOT_RECORDED, np.int32)
    first: dict[int, _Event] = {}
    for event in events:
        _check_same_token(event, first.setdefault(event.token, event))
        cell = ids[row_of[event.token], event.layer]
        if cell[0] != NOT_RECORDED:
            raise _wrong(
                event.line,
                "layer",
                f"token {event.token} has {event.layer} already: give each once",
            )
        cell[: len(event.experts)] = event.experts
    phase, seq = ([getattr(first[token], name) for token in row_of] for name in ("phase", "seq"))
    return Trace(ids, np.array(phase), np.array(seq), meta)


def _check_same_token(event: _Event, first: _Event) -> None:
    for name in ("phase", "seq"):
        if getattr(event, name) != getattr(first, name):
            raise _wrong(
                event.line,
                name,
                f"line {first.line} of the same token has another: give one for each token",
            )


def _wrong(line: int, name: str, why: str) -> TraceError:
    return TraceError(f"line {line}, field {name!r}: {why}")
