from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.conftest import Cli
from hotexperts.bench.difference import Step, first_difference, max_difference, same_bits
from hotexperts.cache import CPUBackingStore
from hotexperts.policy import DEFAULT_POLICY
from hotexperts.transformers import load
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

CPU = ("--device", "cpu", "--tokens", 4)


@pytest.mark.parametrize("algorithm", ["eager", "batched_mm", "grouped_mm"])
def test_a_sound_cache_is_identical_at_every_size(
    algorithm: str, saved_model: Path, cli: Cli
) -> None:
    options = ("--algorithm", algorithm, "--expert-cache-size", "1,2,8", "--json", *CPU)
    result = cli("verify", saved_model, *options)
    data = result.json
    assert (result.status, result.err) == (0, "")
    assert data["passed"]
    assert data["algorithm"] == algorithm
    assert [row["capacity"] for row in data["capacities"]] == [1, 2, 8]
    for row in data["capacities"]:
        assert row["first_difference"] is None
        assert row["max_abs_logits"] == 0.0
        assert row["num_equal_tokens"] == 4
    misses = [row["stats"]["misses"] for row in data["capacities"]]
    assert misses == sorted(misses, reverse=True)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_verify_every_family(family: str, tmp_path: Path, cli: Cli) -> None:
    if cause := zoo.known_exception(family):
        pytest.skip(cause)
    folder = zoo.save_checkpoint(family, tmp_path)
    options = ("--expert-cache-size", "1,8", "--device", "cpu", "--tokens", 2, "--json")
    result = cli("verify", folder, *options)
    assert result.status == 0
    assert [row["capacity"] for row in result.json["capacities"]] == [1, 8]
    assert [row["first_difference"] for row in result.json["capacities"]] == [None, None]
    assert all(row["stats"]["misses"] for row in result.json["capacities"])


@pytest.mark.interpret
def test_verify_a_cache_that_the_device_manages(
    saved_model: Path, kernel_device: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        modes.append(model.expert_cache.mode)
        return model

    monkeypatch.setattr("hotexperts.cli.compare.load", spy)
    options = ("--cache-mode", "device", "--device", kernel_device)  # kernels are interpreted
    some = ("--expert-cache-size", "1,3", "--prompt", "def read", "--tokens", 2)
    data = cli("verify", saved_model, *options, *some, "--json").json
    assert (data["passed"], data["cache_mode"]) == (True, "device")
    assert data["cache_mode_reason"] is None
    assert modes == ["host", "device", "device"], "one look at the model, then each size"
    ahead = cli("verify", saved_model, *options, *some, "--prefetch", "router", "--json").json
    assert ahead["passed"]
    assert ahead["capacities"][1]["stats"]["prefetches"] > 0
    assert ahead["capacities"][1]["stats"]["misses"] == data["capacities"][1]["stats"]["misses"]
    one = ("--expert-cache-size", 3, "--prompt", "x", "--tokens", 1)
    assert f"{DEFAULT_POLICY} run by the device" in " ".join(
        cli("verify", saved_model, *options, *one).out.split()
    )


@pytest.mark.parametrize(
    ("store", "cause"), [("ram", "no CUDA device"), ("file", "experts stay in the file")]
)
def test_verify_says_why_auto_is_the_host(
    store: str, cause: str, saved_model: Path, cli: Cli
) -> None:
    options = ("--expert-cache-size", "2", "--expert-store", store, *CPU)
    data = cli("verify", saved_model, *options, "--json").json
    assert (data["cache_mode"], data["cache_mode_reason"]) == ("host", f"host: {cause}")
    shown = " ".join(cli("verify", saved_model, *options).out.split())
    assert f"{DEFAULT_POLICY} run by the host: {cause}" in shown


def test_verify_the_model_inside(cli: Cli) -> None:
    options = ("--expert-cache-size", "1,8", "--device", "cpu", "--tokens", 2)
    result = cli("verify", *options)
    assert result.status == 0
    assert result.out.startswith("the demonstration model: cached against resident")
    assert result.out.count("identical") == 2


def test_the_default_sizes_and_the_table(saved_model: Path, cli: Cli) -> None:
    result = cli("verify", saved_model, "--prompt", "some text", "--expert-store", "file", *CPU)
    assert result.status == 0
    assert result.out.count("identical") == 4
    for capacity in (1, 2, 4, 8):
        assert f"{capacity} of 8" in result.out


def test_a_budget_gives_the_slots_that_run_gets(saved_model: Path, cli: Cli) -> None:
    budget = ("--expert-cache-size", "400KiB", "--json")
    ran = cli("run", saved_model, "--prompt", "x", "--max-new-tokens", 2, *budget, *CPU[:2]).json
    verified = cli("verify", saved_model, *budget, *CPU).json
    assert [row["capacity"] for row in verified["capacities"]] == [ran["cache"]["capacity"]]


def test_auto_is_a_size_too(saved_model: Path, cli: Cli) -> None:
    rows = cli("verify", saved_model, "--expert-cache-size", "auto, 2", "--json", *CPU).json
    assert [row["capacity"] for row in rows["capacities"]] == [8, 2]


def test_quantised_experts_are_compared_as_the_cache_keeps_them(tmp_path: Path, cli: Cli) -> None:
    zoo.build_fp8_checkpoint(tmp_path)
    assert cli("verify", tmp_path, "--expert-cache-size", "2", *CPU).status == 0


@pytest.fixture
def one_wrong_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: expert 5 of the second layer is read with one element off."""
    original = CPUBackingStore.copy_into
    stores: list[int] = []

    def copy_into(self: CPUBackingStore, expert: int, tensors: Sequence[torch.Tensor]) -> None:
        original(self, expert, tensors)
        if id(self) not in stores:
            stores.append(id(self))
        if expert == 5 and stores.index(id(self)) == 1:
            tensors[-1][3, 0] += 1.0

    monkeypatch.setattr(CPUBackingStore, "copy_into", copy_into)


@pytest.mark.usefixtures("one_wrong_weight")
def test_one_wrong_weight_is_found_and_placed(saved_model: Path, cli: Cli) -> None:
    result = cli("verify", saved_model, "--expert-cache-size", "2", "--json", *CPU)
    first = result.json["capacities"][0]["first_difference"]
    assert result.status == 1
    assert not result.json["passed"]
    assert first["where"] == "layer 1"
    assert 0 <= first["position"] < 32
    assert first["max_abs_difference"] > 0


@pytest.mark.usefixtures("one_wrong_weight")
def test_a_difference_is_said(saved_model: Path, cli: Cli) -> None:
    result = cli("verify", saved_model, "--expert-cache-size", "2", *CPU)
    assert result.status == 1
    assert "DIFFERENT" in result.out
    assert "2 slots: first difference at token position" in " ".join(result.out.split())


@pytest.mark.usefixtures("one_wrong_weight")
@pytest.mark.parametrize(("tolerance", "status"), [(1e-9, 1), (1e9, 0)])
def test_a_tolerance_is_on_logits(
    tolerance: float, status: int, saved_model: Path, cli: Cli
) -> None:
    options = ("--expert-cache-size", "2", "--tolerance", tolerance, *CPU)
    result = cli("verify", saved_model, *options)
    assert result.status == status
    assert ("within 1e+09" in result.out) == (status == 0)


def test_bits_count_not_values() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.half())
    assert max_difference(zero, nan) == torch.inf


def test_the_first_difference_is_the_earliest_step_then_layer() -> None:
    def steps() -> list[Step]:
        shapes = (3, 1, 1)  # a prompt of three, then two tokens
        return [Step([torch.zeros(n, 4) for _ in range(3)], torch.zeros(n, 5)) for n in shapes]

    found = steps()
    assert first_difference(steps(), found, 3) is None
    found[2].logits[0, 1] = 7.0
    found[1].hidden[2][0, 0] = 2.0
    expected = {"position": 3, "where": "layer 1", "max_abs_difference": 2.0}
    assert first_difference(steps(), found, 3) == expected
    found[0].hidden[0][2, 0] = torch.nan
    expected = {"position": 2, "where": "embeddings", "max_abs_difference": None}
    assert first_difference(steps(), found, 3) == expected


@pytest.mark.parametrize("command", ["verify", "bench"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--expert-packing", "packed12"), "do not work here (host: no CUDA device): use expert_p"),
        (("--cache-mode", "device"), "cache_mode 'device' cannot work here, no CUDA device"),
    ],
)
def test_what_cannot_work_is_refused_before_the_resident_model_loads(
    command: str,
    option: tuple[str, str],
    message: str,
    saved_model: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("hotexperts.bench.sources", "hotexperts.cli.compare"):
        monkeypatch.setattr(f"{module}.resident_model", None)
    sizes = ("--prompt-tokens", 4, "--steps", 2) if command == "bench" else ()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = cli(command, saved_model, "--device", "cpu", "--expert-cache-size", 2, *sizes, *option)
    assert (found.status, found.out) == (2, "")
    assert message in found.err
