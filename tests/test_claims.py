"""Every number in the README's text has its place, and is what the result says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def claims() -> Any:
    spec = importlib.util.spec_from_file_location("claims", ROOT / "tools/claims.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["claims"] = module
    spec.loader.exec_module(module)
    return module


def test_every_claim_is_what_its_result_says(claims: Any) -> None:
    said = claims.prose(README)
    assert [c.rendered() for c in claims.CLAIMS if c.rendered() not in said] == []
    assert [words for words in claims.STATED if words not in said] == []


def test_every_number_has_a_place(claims: Any) -> None:
    assert claims.numbers_without_a_place(README) == []


@pytest.mark.parametrize(
    "said", ["It is 3.5 times as fast.", "One H200 does 40 tokens/s.", "at 73 tokens/s this way"]
)
def test_a_number_without_a_place_is_found(said: str, claims: Any) -> None:
    (found,) = claims.numbers_without_a_place(f"{README}\n{said}\n")
    assert said.split()[1] in found or said.split()[2] in found


def test_a_result_that_changes_changes_the_words(
    claims: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {"device-6GiB-adv": {"tokens_per_s": 81.4}}
    monkeypatch.setattr(claims, "load", lambda result: {"cases": cases})
    assert claims.CLAIMS[0].rendered() == "at 81 tokens/s this way"


def test_every_generated_table_of_results_is_listed(claims: Any) -> None:
    examples = {"run", "verify", "python", "test"}
    blocks = {part.split(" ")[0] for part in README.split("<!-- ")[1:]} - {"end"}
    assert blocks == examples | set(claims.TABLES)


def test_every_result_says_how_it_was_measured(claims: Any) -> None:
    for result in {*claims.TABLES.values(), *(claim.result for claim in claims.CLAIMS)}:
        data = claims.load(result)
        assert data["command"].startswith("python bench/")
        assert {"date", "commit", "python", "cpu_cores", "versions"} <= set(data["machine"])
        assert data["machine"]["versions"]["torch"]


def test_the_page_is_up_to_date(claims: Any) -> None:
    assert claims.PAGE.read_text() == claims.page(), "run python tools/claims.py"
