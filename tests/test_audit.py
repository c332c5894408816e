"""The audit says what it found, what it could not look at, and when nobody answered."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def audit() -> Any:
    path = Path(__file__).parents[1] / "tools/audit.py"
    spec = importlib.util.spec_from_file_location("audit", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = module
    spec.loader.exec_module(module)
    return module


def test_what_is_known_is_listed(audit: Any) -> None:
    vuln = {"id": "PYSEC-2030-1", "fix_versions": ["2.1"], "aliases": [], "description": "x"}
    packages = [
        {"name": "a", "version": "2.0", "vulns": [vuln]},
        {"name": "b", "version": "1.0", "vulns": []},
        {"name": "torch", "skip_reason": "not found on PyPI"},
    ]
    found = audit.verdict(json.dumps({"dependencies": packages}), "")
    assert found.status == 1
    assert found.lines == [
        "not audited: torch: not found on PyPI",
        "a 2.0: PYSEC-2030-1, fixed in 2.1",
        "2 packages audited, 1 known vulnerabilities",
    ]
    assert audit.verdict(json.dumps({"dependencies": packages[1:]}), "").status == 0


def test_a_database_out_of_reach_is_told_and_is_no_failure(audit: Any) -> None:
    said = "ERROR:pip_audit._cli:Could not connect to PyPI's vulnerability feed"
    found = audit.verdict("", f"Traceback\n{said}\n")
    assert found.status == 0
    assert found.lines == [f"not audited: the database cannot be reached ({said})"]


def test_an_audit_that_went_wrong_is_a_failure(audit: Any) -> None:
    for output, errors in (("", "No module named pip_audit"), ("{}", ""), ("[1]", "")):
        assert audit.verdict(output, errors).status == 2
