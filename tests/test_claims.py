"""Every number in README's and the benchmarks' text has its place, and is what a result says."""

from __future__ import annotations

import pytest

import claim
import claims

PAGES = claims.documents()


def test_every_claim_is_what_its_result_says() -> None:
    said = claims.prose(PAGES)
    assert [c.rendered() for c in claims.CLAIMS if c.rendered() not in said] == []
    assert [words for words in claims.STATED if words not in said] == []


def test_every_number_has_a_place() -> None:
    assert claims.numbers_without_a_place(PAGES) == []


@pytest.mark.parametrize(
    "said", ["It is 3.5 times as fast.", "One H200 does 40 tokens/s.", "at 999 tokens/s this way"]
)
def test_a_number_without_a_place_is_found(said: str) -> None:
    (found,) = claims.numbers_without_a_place(f"{PAGES}\n{said}\n")
    assert said.split()[1] in found or said.split()[2] in found


def test_a_result_that_changes_changes_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {"device-6GiB-adv": {"tokens_per_s": 81.4}}
    monkeypatch.setattr(claim, "load", lambda result: {"cases": cases})
    said = next(c for c in claims.CLAIMS if c.said == "at {} tokens/s this way")
    assert said.rendered() == "at 81 tokens/s this way"


def test_every_generated_table_of_results_is_listed() -> None:
    examples = {"run", "verify", "python", "test"}
    blocks = {part.split(" ")[0] for part in PAGES.split("<!-- ")[1:]} - {"end"}
    assert blocks == examples | set(claims.TABLES)


def test_every_result_is_shown() -> None:
    there = {path.stem for path in (claims.ROOT / "bench/results").glob("*.json")}
    # On pages of their own.
    elsewhere = {
        "bench-gpt-oss-20b",
        "policies",
        "prefetch-decode",
        "prefetch-simulated",
        "tiers-gpu",
    }
    elsewhere |= {"two-gpu", "vllm-processes"}
    shown = {*claims.TABLES.values(), *(elsewhere & there)}
    assert there - {"gpu-tests"} == shown


def test_every_result_says_how_it_was_measured() -> None:
    for result in {*claims.TABLES.values(), *(said.result for said in claims.CLAIMS)}:
        data = claims.load(result)
        assert data["command"].startswith("python bench/")
        assert {"date", "commit", "python", "cpu_cores", "versions"} <= set(data["machine"])
        assert data["machine"]["versions"]["torch"]


def test_the_page_is_up_to_date() -> None:
    assert claims.PAGE.read_text() == claims.page(), "run python tools/claims.py"
