"""The documentation builds without a network, is whole, and a broken link stops it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import check_site

ROOT = Path(__file__).parents[2]
needs_zensical = pytest.mark.skipif(
    not importlib.util.find_spec("zensical"), reason="needs Zensical"
)


def sources(folder: Path) -> Path:
    """A copy of what the site is built from."""
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "src").symlink_to(ROOT / "src")
    return folder


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@needs_zensical
def test_the_site_is_whole(tmp_path: Path) -> None:
    done = built(sources(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    assert check_site.faults(site) == []
    api = (site / "api/transformers.html").read_text()
    assert "Load a Mixture-of-Experts model whose experts stay on the host" in api
    assert "expert_cache_size" in api


def test_every_page_is_in_the_order_of_the_site() -> None:
    told = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    there = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(told) == sorted(there)


@needs_zensical
def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    page = sources(tmp_path) / "docs/why.md"
    page.write_text(page.read_text() + "\n[nowhere](nowhere.md)\n")
    done = built(tmp_path)
    assert done.returncode != 0
    assert "page does not exist" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<img src="lost.svg">', "lost.svg is not there"),
        ('<a href="b.html#lost">', "b.html#lost has no such anchor"),
        ('<a href="#lost">', "#lost has no such anchor"),
        ('<script src="https://example.org/a.js"></script>', "<script> loads https://example.org"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "<link> loads //example.org"),
    ],
)
def test_what_is_missing_or_elsewhere_is_found(body: str, fault: str, tmp_path: Path) -> None:
    whole = '<h1 id="top"></h1><a href="a.html#top"></a><a href="https://example.org"></a>'
    (tmp_path / "b.html").write_text(whole)
    (tmp_path / "a.html").write_text(whole)
    assert check_site.faults(tmp_path) == []
    (tmp_path / "c.html").write_text(body)
    (found,) = check_site.faults(tmp_path)
    assert fault in found


def test_no_site_is_no_good_site(tmp_path: Path) -> None:
    (found,) = check_site.faults(tmp_path)
    assert "make docs" in found
