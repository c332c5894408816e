"""What a served cache did between two looks at its counters."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import urlsplit

from hotexperts.errors import ConfigError
from hotexperts.observe.names import COUNTERS, GAUGES, PREFIX

TIMEOUT_SECONDS = 5.0
Totals = dict[str, dict[str, float]]  # rank: counter: value


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one rank, between two looks.

    Attributes:
        hit_rate: of demanded experts, in parts of 1; None where none was demanded.
        gb_s: copied to the GPU, 10^9 bytes a second.
        misses_s: missed experts a second.
        bypasses_s: of them, served without entering the cache.
        evictions_s: experts that left a second.
        waves: kernel calls a layer call; None where there was no call.
        lru_hit_rate: what LRU would have hit; None where that is not counted, or none demanded.
        best_hit_rate: likewise what the policy's best shadow caches would have.
        ram_hit_rate: of experts on disk that were to be copied, those in host memory; None where
            none are on disk, or none was to be copied.
        disk_gb_s: read from disk, 10^9 bytes a second; None where no experts are there.
        prefetch_gb_s: copied before a layer asked, a part of `gb_s`; None, like the next two, where
            nothing is prefetched.
        prefetch_saved_rate: the part of these bytes that layers took; None where there were none.
        prefetching_layers: whose switch is on at the second look.
    """

    hit_rate: float | None
    gb_s: float
    misses_s: float
    bypasses_s: float
    evictions_s: float
    waves: float | None
    lru_hit_rate: float | None = None
    best_hit_rate: float | None = None
    ram_hit_rate: float | None = None
    disk_gb_s: float | None = None
    prefetch_gb_s: float | None = None
    prefetch_saved_rate: float | None = None
    prefetching_layers: int | None = None


def read_totals(url: str) -> Totals:
    """The counters at a metrics address, by rank.

    Raises:
        ConfigError: nobody answers there, or not with these counters.
        ModuleNotFoundError: `prometheus_client` is not installed.
    """
    from prometheus_client.parser import text_string_to_metric_families

    if not _is_address(url):
        raise ConfigError(f"{url} is no address: give one such as http://127.0.0.1:8000/metrics")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            text = answer.read().decode(errors="replace")
        families = list(text_string_to_metric_families(text))
    except (OSError, HTTPException) as error:
        raise ConfigError(f"{url} does not answer ({error}): is the server up?") from error
    except ValueError as error:
        raise ConfigError(
            f"{url} answers with something else than metrics ({error}): give the address that ends "
            "in /metrics"
        ) from error
    found: Totals = {}
    for family in families:
        name = family.name.removeprefix(PREFIX)
        is_gauge = name in GAUGES
        for sample in family.samples if is_gauge or name in COUNTERS else ():
            if is_gauge or sample.name.endswith("_total"):
                found.setdefault(sample.labels.get("rank", "0"), {})[name] = sample.value
    if not found:
        raise ConfigError(f"{url} has no counters of an expert cache: is one in use there?")
    return found


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the host, or a port beyond all
        return False


def rates(before: Totals, after: Totals, seconds: float) -> dict[str, Rates]:
    """By rank; a counter that fell was reset, and counts from zero."""
    return {rank: _rates(before.get(rank, {}), now, seconds) for rank, now in after.items()}


def _rates(before: dict[str, float], after: dict[str, float], seconds: float) -> Rates:
    def new(name: str) -> float:
        then, now = before.get(name, 0.0), after.get(name, 0.0)
        return now - then if now >= then else now

    def rate(name: str) -> float | None:
        return new(name) / demands if demands and name in after else None

    copied = new("ram_hits") + new("disk_reads")
    demands, calls = new("hits") + new("misses"), new("calls")
    ahead, has_prefetch = new("prefetch_bytes"), "prefetch_bytes" in after
    return Rates(
        rate("hits"),
        new("bytes_moved") / seconds / 1e9,
        new("misses") / seconds,
        new("bypasses") / seconds,
        new("evictions") / seconds,
        new("waves") / calls if calls else None,
        rate("lru_hits"),
        rate("best_shadow_hits"),
        new("ram_hits") / copied if copied else None,
        new("disk_bytes") / seconds / 1e9 if "disk_bytes" in after else None,
        ahead / seconds / 1e9 if has_prefetch else None,
        new("prefetch_saved_bytes") / ahead if ahead else None,
        int(after["prefetching_layers"]) if "prefetching_layers" in after else None,
    )
