"""Counters that one process leaves and another reads."""

from __future__ import annotations

import gc
import json
import re
import urllib.request
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotexperts.errors import ConfigError
from hotexperts.integrations.vllm import metrics
from hotexperts.observe import exporter, files
from hotexperts.observe.names import COUNTERS, GAUGES
from hotexperts.stats import CacheStats


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "_folder", lambda: tmp_path)
    return tmp_path


def test_every_counter_has_a_meaning() -> None:
    assert {*COUNTERS, *GAUGES} == {field.name for field in fields(CacheStats)}


def test_counters_are_read_by_rank_and_strange_files_are_left_alone(folder: Path) -> None:
    for rank in (1, 0):
        counters = {"a": {"hits": rank, "misses": 2}, "b": {"hits": 10, "misses": 0}}
        files.write_counters(files.counter_file("x", rank), counters)
    (folder / "hotexperts-x-2.json").write_text("{ half")
    (folder / "hotexperts-x-notes.json").write_text("{}")
    files.write_counters(files.counter_file("y", 0), {})
    found = files.read_counters("x")
    assert list(found) == [0, 1]
    assert files.total(found[1]) == {"hits": 11, "misses": 2}


class Caches(SimpleNamespace):
    """A stand-in that, other than its base, can be referred to weakly."""


def test_a_publisher_writes_once_a_second_and_logs_what_is_new(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    stats = CacheStats(calls=1, hits=3, misses=1)
    caches: Any = Caches(
        config=SimpleNamespace(instance_id="z"), layers={}, stats=lambda: {"a": stats.as_dict()}
    )
    publisher = metrics.Publisher(caches, 0)
    with caplog.at_level("INFO", logger="vllm.hotexperts"):
        publisher.after_step()
        assert "75.0 % hits of 4" in caplog.text
        stats.hits = 9
        publisher.after_step()  # too early
        assert files.read_counters("z")[0]["a"]["hits"] == 3
        now[0] += 1.5
        publisher.after_step()
        assert files.read_counters("z")[0]["a"]["hits"] == 9
        assert len(caplog.records) == 1
        now[0] += 60
        publisher.after_step()
    assert "100.0 % hits of 6" in caplog.records[1].getMessage()
    publisher.close()
    assert files.read_counters("z") == {}


def test_the_file_goes_with_its_caches(folder: Path) -> None:
    caches: Any = Caches(config=SimpleNamespace(instance_id="y"), layers={}, stats=dict)
    caches.publisher = None
    (publisher,) = metrics.publishers_of([caches], 0)
    publisher._publish({})
    assert list(folder.iterdir())
    del publisher, caches
    gc.collect()
    assert not list(folder.iterdir())


def test_a_server_answers_prometheus(folder: Path) -> None:
    pytest.importorskip("prometheus_client")
    counters = {"a": {"hits": 3}, "b": {"hits": 4, "misses": 1}}
    server = exporter.MetricsServer(lambda: {0: counters})
    try:
        with urllib.request.urlopen(server.url) as answer:
            text = answer.read().decode()
        assert 'hotexperts_hits_total{rank="0"} 7.0' in text
        assert 'hotexperts_misses_total{rank="0"} 1.0' in text
        assert "hotexperts_lru_hits" not in text, "nobody counts them"
        counters["b"]["lru_hits"] = 5
        with urllib.request.urlopen(server.url) as answer:
            assert b'hotexperts_lru_hits_total{rank="0"} 5.0' in answer.read()
        counters["a"] |= {"prefetches": 7, "prefetching_layers": 1}
        counters["b"] |= {"prefetches": 2, "prefetching_layers": 0}
        with urllib.request.urlopen(server.url) as answer:
            text = answer.read().decode()
        assert 'hotexperts_prefetches_total{rank="0"} 9.0' in text
        assert "# TYPE hotexperts_prefetching_layers gauge" in text, "it falls, too"
        assert 'hotexperts_prefetching_layers{rank="0"} 1.0' in text
        port = int(server.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} .*give another port"):
            exporter.MetricsServer(lambda: {}, port)
    finally:
        server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(server.url)


def test_the_dashboard_asks_for_counters_that_exist() -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())
    asked = re.findall(r"hotexperts_(\w+?)_total", json.dumps(dashboard))
    assert set(asked) <= set(COUNTERS)
    assert {"hits", "misses", "bytes_moved", "lru_hits", "best_shadow_hits"} <= set(asked)
    assert {"prefetch_bytes", "prefetch_saved_bytes"} <= set(asked)
    states = re.findall(r"\(hotexperts_(\w+?)\)", json.dumps(dashboard))
    assert states == list(GAUGES)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
