"""Tables of `bench/results/vllm-promise.json`: a whole model under ceilings of GPU memory.

Speeds are measured at the link of the machine that measured. For slower links they are what the
measured missed bytes allow: those over the link, nothing else counted, so an upper limit.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent.parent / "bench/results/vllm-promise.json"


def load() -> Any:
    """The one case there is, and the machine that measured it."""
    data = json.loads(RESULT.read_text())
    return data["cases"]["whole"]


def card_table() -> str:
    """For the README: what a card of so much memory gets, a row each."""
    case = load()
    links = _links(case)
    lines = [
        f"| GPU memory | slots a layer | tokens/s at {case['link_gb_s']:.0f} GB/s, measured | "
        + " | ".join(f"at {link}, at most" for link in links)
        + " | 8 sequences, tokens/s, measured | prompt of 2000 tokens, measured |",
        "|---" * (5 + len(links)) + "|",
    ]
    for ceiling, found in case["ceilings"].items():
        one, eight, prompt = (case["runs"][f"{ceiling}, {way}"] for way in _WAYS)
        forecasts = [_speed(one["forecast_tokens_per_s"][link]) for link in links]
        cells = [
            ceiling,
            str(found["slots"]),
            _speed(one["tokens_per_s"]),
            *forecasts,
            _speed(eight["tokens_per_s"]),
            f"{prompt['ms'] / 1e3:.1f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_table() -> str:
    """What is used, and how much of it is hit."""
    case = load()
    lines = [
        "| ceiling | slots a layer | GPU memory in use | hits, batch 1 | batch 8 | a prompt |",
        "|---" * 6 + "|",
    ]
    for ceiling, found in case["ceilings"].items():
        rates = [f"{100 * case['runs'][f'{ceiling}, {way}']['hit_rate']:.1f} %" for way in _WAYS]
        used = f"{found['gpu_bytes_used'] / 2**30:.2f} GiB"
        lines.append(f"| {ceiling} | {found['slots']} | {used} | {' | '.join(rates)} |")
    return "\n".join(lines)


def speed_table() -> str:
    """Tokens a second of all sequences together."""
    case = load()
    links = _links(case)
    lines = [_head(case, "sequences", [f"{link}, at most" for link in links])]
    for ceiling, way in product(case["ceilings"], _WAYS[:2]):
        run = case["runs"][f"{ceiling}, {way}"]
        cells = [_speed(run["forecast_tokens_per_s"][link]) for link in links]
        measured = f"{_speed(run['tokens_per_s'])} | {100 * run['of_link']:.0f} %"
        count = way.removeprefix("batch ")
        lines.append(f"| {ceiling} | {count} | {measured} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prompt_table() -> str:
    """Seconds to the first token of a prompt."""
    case = load()
    links = _links(case)
    lines = [_head(case, "missed", [f"{link}, at least" for link in links])]
    for ceiling in case["ceilings"]:
        run = case["runs"][f"{ceiling}, prefill"]
        cells = [f"{run['missed_gb'] / _gb_s(link):.1f} s" for link in links]
        measured = f"{run['ms'] / 1e3:.1f} s | {100 * run['of_link']:.0f} %"
        missed = f"{run['missed_gb']:.0f} GB"
        lines.append(f"| {ceiling} | {missed} | {measured} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _head(case: Any, second: str, others: list[str]) -> str:
    columns = ["ceiling", second, f"{case['link_gb_s']:.1f} GB/s, measured", "of the link", *others]
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


_WAYS = ("batch 1", "batch 8", "prefill")


def _links(case: Any) -> list[str]:
    run = next(run for run in case["runs"].values() if "forecast_tokens_per_s" in run)
    return sorted(run["forecast_tokens_per_s"], key=_gb_s, reverse=True)


def _gb_s(link: str) -> float:
    return float(link.removesuffix(" GB/s"))


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f}"
