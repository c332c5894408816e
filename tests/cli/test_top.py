"""`hotexperts top` against a server whose counters move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cli.conftest import Cli
from hotexperts.cli import top as command
from hotexperts.observe.exporter import MetricsServer
from hotexperts.observe.rates import Rates, rates

pytest.importorskip("prometheus_client")


@pytest.fixture
def url() -> Iterator[str]:
    """Each look at the counters finds three hits, a miss and a gigabyte more."""
    looks = [0]

    def read() -> dict[int, Any]:
        looks[0] += 1
        counts = {"calls": 2, "hits": 3, "misses": 1, "waves": 3, "bytes_moved": 10**9}
        return {0: {"layer": {name: looks[0] * value for name, value in counts.items()}}}

    server = MetricsServer(read)
    yield server.url
    server.close()


def test_one_look_as_json(url: str, cli: Cli) -> None:
    found = cli("top", url, "--interval", 0.1, "--json").json["0"]
    assert found["hit_rate"] == 0.75
    assert found["waves"] == 1.5
    assert 5 < found["gb_s"] < 10.1
    assert found["evictions_s"] == 0


def test_it_watches_until_ctrl_c(url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = iter([None, None])

    def sleep(seconds: float) -> None:
        if next(sleeps, StopIteration) is StopIteration:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", sleep)
    result = cli("top", url, "--link-gb-s", 50)
    assert (result.status, result.err) == (0, "")
    assert "75.0%" in result.out
    assert "of link" in result.out
    assert "%" in result.out.split("75.0%")[1]


def test_hits_of_the_shadows_are_shown_where_they_are_counted(cli: Cli) -> None:
    looks = [0]

    def read() -> dict[int, Any]:
        looks[0] += 1
        counts = {"hits": 6, "misses": 4, "lru_hits": 5, "best_shadow_hits": 7}
        return {0: {"layer": {name: looks[0] * value for name, value in counts.items()}}}

    server = MetricsServer(read)
    try:
        found = cli("top", server.url, "--interval", 0.1, "--json").json["0"]
    finally:
        server.close()
    names = ("hit_rate", "lru_hit_rate", "best_hit_rate")
    assert [found[name] for name in names] == [0.6, 0.5, 0.7]
    table = command._table(
        {"0": Rates(**found), "1": rates({}, {"1": {"hits": 1.0}}, 1.0)["1"]}, None
    )
    assert [column.header for column in table.columns][1:4] == ["hits", "LRU", "best"]
    cells = [list(column.cells) for column in table.columns]
    assert cells[1:4] == [["60.0%", "100.0%"], ["50.0%", "-"], ["70.0%", "-"]]


def test_prefetches_are_shown_where_there_are_any(cli: Cli) -> None:
    looks = [0]

    def read() -> dict[int, Any]:
        looks[0] += 1
        counts = {"hits": 6, "prefetch_bytes": 10**9, "prefetch_saved_bytes": 75 * 10**7}
        layer = {name: looks[0] * value for name, value in counts.items()}
        return {0: {"first": {**layer, "prefetching_layers": 1}, "second": layer}}

    server = MetricsServer(read)
    try:
        found = cli("top", server.url, "--interval", 0.1, "--json").json["0"]
    finally:
        server.close()
    assert (found["prefetch_saved_rate"], found["prefetching_layers"]) == (0.75, 1)
    assert 5 < found["prefetch_gb_s"] < 20.1
    others = rates({}, {"1": {"hits": 1.0}}, 1.0)["1"]
    table = command._table({"0": Rates(**found), "1": others}, None)
    assert [column.header for column in table.columns][-3:] == ["ahead GB/s", "taken", "layers"]
    cells = [list(column.cells) for column in table.columns]
    assert cells[-2:] == [["75.0%", "-"], ["1", "-"]]


def test_a_counter_that_fell_was_reset() -> None:
    before, after = {"0": {"hits": 90.0, "misses": 9.0}}, {"0": {"hits": 4.0, "misses": 12.0}}
    found = rates(before, after, 2.0)["0"]
    assert found.hit_rate == 4 / 7
    assert found.misses_s == 1.5
    assert rates({}, {"1": {}}, 1.0) == {"1": Rates(None, 0.0, 0.0, 0.0, 0.0, None)}


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nonsense", "nonsense is no address: give one such as http://"),
        ("http://127.0.0.1:9/metrics", "does not answer"),
        ("http://127.0.0.1:99999/", "99999/ is no address: give one such as http://"),
        ("http://", "http:// is no address: give one such as"),
        ("http://[::1/metrics", "http://[::1/metrics is no address: give one such as"),
    ],
)
def test_what_answers_nothing_is_an_error(address: str, message: str, cli: Cli) -> None:
    result = cli("top", address)
    assert result.status == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_a_server_without_a_cache_is_an_error(cli: Cli) -> None:
    server = MetricsServer(dict)
    try:
        result = cli("top", server.url)
    finally:
        server.close()
    assert result.status == 2
    assert "has no counters of an expert cache" in result.err
