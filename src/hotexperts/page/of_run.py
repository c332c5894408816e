"""The page of `hotexperts run --json`: configuration, hits of each layer, bytes and speed."""

from __future__ import annotations

from hotexperts.fields import Fields
from hotexperts.page.document import Markup, Page, Text, bar, escape, facts, section, table
from hotexperts.page.numbers import UNKNOWN, nbytes, number, percent


def run_page(data: Fields) -> Page:
    """The page.

    Raises:
        FieldError: a field that is not what `hotexperts run --json` writes.
    """
    cache = data.part("cache")
    return Page(
        f"Run of {data.text('model')}",
        [
            section("Configuration", facts(_configuration(data, cache))),
            section("Result", facts(_result(data))),
            section("Layers", _layers(data)),
            section("Text", _text(data)),
        ],
    )


_STORES = {
    "ram": "host memory",
    "file": "the checkpoint's file",
    "disk": "a pack on disk, some of them in host memory",
}


def _configuration(data: Fields, cache: Fields) -> list[tuple[str, str]]:
    kept = _STORES.get(cache.text("store"), cache.text("store"))
    reason = cache.text("mode_reason") if "mode_reason" in cache else cache.text("mode")
    return [
        ("file", data.file),
        ("model", f"{data.text('model')} ({data.text('model_class')}, {data.text('dtype')})"),
        ("device", data.text("device")),
        (
            "cache",
            f"{cache.count('capacity')} of {cache.count('num_experts')} experts in each of "
            f"{cache.count('num_layers')} layers: {cache.text('reason')}",
        ),
        ("policy", f"{cache.text('policy')}, run by the {reason}"),
        ("experts in", kept),
    ]


def _result(data: Fields) -> list[tuple[str, str]]:
    stats, seconds, memory = (data.part(name) for name in ("stats", "seconds", "memory"))
    rate = data.number_or_none("decode_tokens_per_second")
    return [
        (
            "experts",
            f"{percent(stats.rate_or_none('hit_rate'))} hits: {stats.count('hits'):,} hits, "
            f"{stats.count('misses'):,} misses, {stats.count('evictions'):,} evictions",
        ),
        ("moved", nbytes(stats.count("bytes_moved"))),
        *_disk(stats),
        *_prefetch(stats),
        ("decode", UNKNOWN if rate is None else f"{number(rate)} tokens/s"),
        (
            "seconds",
            f"{number(seconds.number('load'))} to load, {number(seconds.number('prefill'))} to the "
            f"first of {_num_tokens(data):,} tokens ({data.count('num_prompt_tokens'):,} of "
            f"prompt), {number(seconds.number('decode'))} after it",
        ),
        (
            "memory",
            f"{nbytes(memory.count('slots_nbytes'))} slots, {nbytes(memory.count('banks_nbytes'))} "
            f"banks, {nbytes(memory.count('other_nbytes'))} other weights",
        ),
        ("GPU's peak", nbytes(memory.number_or_none("peak_device_nbytes"))),
        ("host", f"{nbytes(memory.count('host_nbytes'))} of experts"),
        (
            "percent of bound",
            "not known: hotexperts bench measures it",
        ),
    ]


def _disk(stats: Fields) -> list[tuple[str, str]]:
    if "disk_reads" not in stats:
        return []
    read = f"{stats.count('disk_reads'):,} experts, {nbytes(stats.count('disk_bytes'))}"
    return [("from disk", f"{read}; {stats.count('ram_hits'):,} were in memory")]


def _prefetch(stats: Fields) -> list[tuple[str, str]]:
    if "prefetches" not in stats:
        return []
    issued, used = stats.count("prefetches"), stats.count("prefetch_hits")
    taken = nbytes(stats.count("prefetch_saved_bytes"))
    return [
        (
            "prefetched",
            f"{issued:,} experts begun ahead, {used:,} of them used; "
            f"{nbytes(stats.count('prefetch_bytes'))}, {taken} of it taken; "
            f"{stats.count('prefetching_layers')} layers guess at the end",
        )
    ]


def _num_tokens(data: Fields) -> int:
    ids = data.values.get("token_ids")
    return len(ids) if isinstance(ids, list) else data.refuse("token_ids", "a list")


def _layers(data: Fields) -> Markup:
    layers = list(data.parts("layers"))
    has_prefetch = any("prefetches" in layer for layer in layers)
    ahead = ("ahead", "used", "guessed") if has_prefetch else ()
    names = ("layer", "hits", "misses", "evictions", "moved", *ahead, "hit rate", "")
    return table(names, (_cells(layer, has_prefetch=has_prefetch) for layer in layers))


def _cells(layer: Fields, *, has_prefetch: bool) -> list[Text]:
    rate = layer.rate_or_none("hit_rate")
    return [
        layer.text("name"),
        f"{layer.count('hits'):,}",
        f"{layer.count('misses'):,}",
        f"{layer.count('evictions'):,}",
        nbytes(layer.count("bytes_moved")),
        *(_ahead(layer) if has_prefetch else ()),
        percent(rate),
        bar(rate),
    ]


def _ahead(layer: Fields) -> list[Text]:
    is_on = "on" if layer.count("prefetching_layers") else "off"
    return [f"{layer.count('prefetches'):,}", f"{layer.count('prefetch_hits'):,}", is_on]


def _text(data: Fields) -> Markup:
    prompt, answer = escape(data.text("prompt")), escape(data.text("text"))
    return Markup(f"<pre><b>{prompt}</b>{answer}</pre>")
