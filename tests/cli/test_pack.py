from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Cli

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

RUN = ("--prompt", "def", "--max-new-tokens", 4, "--expert-cache-size", 2, "--device", "cpu")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hotexperts"


def test_pack_then_run_from_disk(saved_model: Path, cache_folder: Path, cli: Cli) -> None:
    missing = cli("run", saved_model, *RUN, "--expert-store", "disk")
    assert missing.status == 2
    assert "make it once with `hotexperts pack`" in missing.err
    made = cli("pack", saved_model, "--json").json
    assert (made["num_experts"], made["num_written"]) == (16, 16)
    assert Path(made["path"]).stat().st_size == made["nbytes"]
    assert [str(file) for file in cache_folder.iterdir()] == [made["path"]]
    assert ": kept, " in cli("pack", saved_model).out

    expected = cli("run", saved_model, *RUN, "--json").json
    budget = ("--expert-store", "disk", "--expert-ram-gib", 0.0001)
    found = cli("run", saved_model, *RUN, *budget, "--json")
    assert found.json["token_ids"] == expected["token_ids"]
    assert found.err.startswith("note: experts in disk: as asked; ")
    stats = found.json["stats"]
    assert stats["disk_reads"] > 0
    assert stats["ram_hits"] + stats["disk_reads"] == stats["misses"]
    assert "disk_reads" not in expected["stats"]
    report = " ".join(cli("run", saved_model, *RUN, *budget).out.split())
    assert f"{stats['disk_reads']} read)" in report
    assert "of experts on disk, " in report
    assert "run by the host: experts stay on disk" in report


def test_verify_compares_what_comes_from_disk(saved_model: Path, cli: Cli) -> None:
    cli("pack", saved_model)
    options = ("--expert-store", "disk", "--expert-ram-gib", 0.0001, "--tokens", 3)
    found = cli("verify", saved_model, "--expert-cache-size", "1,8", *options, "--json").json
    assert found["passed"]
    assert all(row["stats"]["disk_reads"] > 0 for row in found["capacities"])


def test_bench_counts_what_comes_from_disk(saved_model: Path, cli: Cli) -> None:
    cli("pack", saved_model)
    options = ("--expert-store", "disk", "--expert-ram-gib", 0.0001, "--device", "cpu")
    short = ("--prompt-tokens", 4, "--steps", 2, "--expert-cache-size", 2, "--domain", "code")
    _, row = cli("bench", saved_model, *short, *options, "--json").json["rows"]
    assert row["verified"] is True
    assert row["warm"]["disk_bytes_per_step"] > 0


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_auto_is_not_what_is_compared_or_measured(
    command: str, saved_model: Path, cli: Cli
) -> None:
    found = cli(command, saved_model, "--expert-store", "auto")
    assert found.status == 2
    assert "give ram, file or disk" in found.err


def test_a_shape_is_not_on_disk(cli: Cli) -> None:
    found = cli("bench", "--shape", "OLMoE-1B-7B", "--expert-ram-gib", 1)
    assert found.status == 2
    assert "--expert-ram-gib is for a model" in found.err


def test_auto_says_where_the_experts_are(saved_model: Path, cli: Cli) -> None:
    found = cli("run", saved_model, *RUN, "--expert-store", "auto", "--json")
    assert found.err.startswith("note: experts in ram: ")
    assert found.json["cache"]["store"] == "ram"
