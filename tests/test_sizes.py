from __future__ import annotations

import re

import pytest

from hotexperts.config import (
    Bytes,
    CacheConfig,
    format_bytes,
    gib_to_bytes,
    parse_bytes,
    parse_cache_size,
    round_up_bytes,
    round_up_gib,
)
from hotexperts.errors import ConfigError
from hotexperts.sizing import (
    LayerShape,
    bank_rows,
    banks_nbytes,
    capacity_for_budget,
    fixed_capacity,
)

LAYERS = [LayerShape(num_experts=16, top_k=4, row_nbytes=1000)] * 3


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("6GiB", 6 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1.5gb", 1_500_000_000),
        (" 7 B ", 7),
        ("9007199254740993B", 9007199254740993),  # 2**53 + 1, which no float is
    ],
)
def test_sizes_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes
    assert parse_cache_size(text) == Bytes(num_bytes)


@pytest.mark.parametrize("value", [32, "32", " 32 "], ids=["int", "text", "spaces"])
def test_a_number_is_a_number_of_slots(value: int | str) -> None:
    assert parse_cache_size(value) == 32
    assert parse_cache_size("auto") == "auto"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "at least 1 slot"),
        ("-3", "at least 1 slot"),
        ("6 parsecs", "unknown unit 'parsecs'.*GiB"),
        ("GiB", "give a number of slots a layer, .auto. or a size"),
        ("", "is .*: give a number of slots"),
        ("0.1B", "less than a byte"),
        (1.5, "give a number of slots"),
        (True, "give a number of slots"),
        ("9" * 400 + "GiB", "'99999999999999999999...' has 403 characters"),
        ("9" * 5000, "has 5000 characters"),
        ("9" * 30 + "GiB", "more than any machine has"),
        ("9" * 30, "beyond any model"),
        pytest.param(10**5000, "beyond any model", id="5000 digits"),
    ],
)
def test_a_size_that_means_nothing_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_cache_size(value)  # type: ignore[arg-type]


def test_an_unknown_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="'ram' or 'file'"):
        CacheConfig(store="tape")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (6 * 2**40, "6.00 TiB")],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_budget_becomes_the_most_slots_that_fit() -> None:
    # 10 slots: 3 layers x 10,000 + two banks of min(8, 6) rows = 42,000; 11 slots: 43,000
    plan = capacity_for_budget(45_000, 500, LAYERS)  # 42,750 after the reserve
    assert plan.capacity == 10
    assert "10 slots a layer" in plan.reason
    assert capacity_for_budget(10**9, 0, LAYERS).capacity == 16


def test_a_budget_holds_what_prefetches_take() -> None:
    # of 42,750 after the reserve 42,000 are slots and banks, 500 the rest: 250 are left
    assert capacity_for_budget(45_000, 500, LAYERS, prefetch_bytes=250).capacity == 10
    plan = capacity_for_budget(45_000, 500, LAYERS, prefetch_bytes=251)
    assert plan.capacity == 9
    assert "751 B (other weights, KV, workspace, prefetch)" in plan.reason
    with pytest.raises(ConfigError, match=r"and the rest \(900 B\) need"):
        capacity_for_budget(10_000, 500, LAYERS, prefetch_bytes=400)


def test_a_budget_below_one_token_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"holds 1 slots a layer, the model uses 4 experts"):
        capacity_for_budget(10_000, 500, LAYERS)


@pytest.mark.parametrize("scale", [1, 1000, 10**6])
@pytest.mark.parametrize("num_experts", [4, 5, 16])
def test_the_refusal_of_a_budget_says_what_is_enough(num_experts: int, scale: int) -> None:
    layers = [LayerShape(num_experts, top_k=4, row_nbytes=1000 * scale)] * 3
    with pytest.raises(ConfigError) as caught:
        capacity_for_budget(scale, 500 * scale, layers)
    found = re.search(r"give at least (\w+), or ask for a shorter context", str(caught.value))
    assert found is not None
    enough = parse_bytes(found[1])
    assert capacity_for_budget(enough, 500 * scale, layers).capacity >= 4
    with pytest.raises(ConfigError):
        capacity_for_budget(int(enough * 0.9), 500 * scale, layers)


def test_more_experts_a_token_than_a_layer_has_need_no_more_than_all() -> None:
    with pytest.raises(ConfigError, match="uses 4 experts a token: 4 slots x 1 layers"):
        capacity_for_budget(1000, 0, [LayerShape(num_experts=4, top_k=9, row_nbytes=1000)])


@pytest.mark.parametrize("num_bytes", [1, 1023, 10 * 2**10, 10**9 + 1, 7.3 * 2**30, 2.0**50])
def test_bytes_rounded_up_are_a_size_again(num_bytes: float) -> None:
    assert num_bytes <= parse_bytes(round_up_bytes(num_bytes)) <= 1.1 * num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (13_000_000, "0.0122"),  # 0.012107: to the nearest would be less
        (4096, "3.82e-06"),
        (2**29, "0.5"),
        (2**30 + 1, "1.01"),
        (1_319_413_953, "1.23"),  # 1.2288
        (123_400_000_000, "115"),
        (999_900 * 2**20, "977"),
    ],
)
def test_gib_rounded_up_are_enough(num_bytes: int, text: str) -> None:
    assert round_up_gib(num_bytes) == text
    assert num_bytes <= gib_to_bytes(float(text), "") <= 1.01 * num_bytes + 1


def test_slots_above_the_experts_are_not_clamped() -> None:
    assert fixed_capacity(16, LAYERS).capacity == 16
    with pytest.raises(ConfigError, match="only 16 experts: give at most 16, or 'auto'"):
        fixed_capacity(17, LAYERS)


def test_no_banks_where_everything_is_resident() -> None:
    assert (bank_rows(16, 16), bank_rows(16, 12)) == (0, 4)
    assert (bank_rows(64, 16), bank_rows(64, 2)) == (8, 2)  # and never more than the slots


def test_each_kind_of_row_has_its_own_banks() -> None:
    layers = [LayerShape(16, 2, 1000), LayerShape(16, 2, 2000), LayerShape(9, 2, 2000)]
    assert banks_nbytes(layers, 8) == 2 * (8 * 1000 + 8 * 2000)
    plan = capacity_for_budget(60_000, 0, layers)
    used = plan.capacity * 5000 + banks_nbytes(layers, plan.capacity)
    assert used <= 57_000
