"""Writes everything in README.md and docs/ that follows from the source or from results.

    python tools/pages.py

Between `<!-- NAME -->` and `<!-- end -->` the text is generated; two pages are as a whole. Examples
are not written here: `readme_tables.py` runs the commands for them. A test compares all of it.
"""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

import claims
import parallel_page
import prefetch_tables
import promise
import result_tables
import troubleshooting
from hotexperts.cli.bench_report import bench_report
from hotexperts.observe.names import COUNTERS, GAUGES, PREFIX
from readme_tables import filled, plain

ROOT = Path(__file__).parent.parent


def blocks() -> dict[str, dict[str, str]]:
    """What is generated, by document and name."""
    return {
        "README.md": {"cards": promise.card_table()},
        "docs/index.md": {"cards": promise.card_table()},
        "docs/policies.md": {"policies": result_tables.policy_tables()},
        "docs/prefetch.md": prefetch_tables.tables()
        | {"prefetch-decode": result_tables.guesses_table()},
        "docs/bench.md": {"gpt-oss": bench_of("bench-gpt-oss-20b")},
        "docs/formats.md": {"tiers-gpu": result_tables.tiers_table()},
        "docs/metrics.md": {"counters": counters_table()},
        "docs/decisions/index.md": {"decisions": decisions()},
        "docs/parallel.md": {
            "split": parallel_page.reckoned(),
            "two-gpu": parallel_page.measured(),
        },
        "docs/benchmarks.md": {
            "memory": promise.memory_table(),
            "speed": promise.speed_table(),
            "prompt": promise.prompt_table(),
            "vllm": result_tables.vllm_table(),
            "eager": result_tables.eager_table(),
            "device": result_tables.device_table(),
            "decode": result_tables.decode_table(),
            "prefill": result_tables.prefill_table(),
            "load": result_tables.load_table(),
            "disk": result_tables.disk_table(),
            "plan": result_tables.plan_table(),
            "copies": result_tables.copies_table(),
            "bytes": result_tables.bytes_table(),
            "replay": result_tables.replay_table(),
            "recording": result_tables.recording_table(),
        },
    }


def bench_of(result: str) -> str:
    """What `hotexperts bench` shows of what it printed with `--json`."""
    page = Console(width=80, color_system=None, file=StringIO())
    page.print(bench_report(result_tables.load(result)))
    lines = page.file.getvalue().rstrip().split("\n")
    return plain("\n".join(line.rstrip() for line in lines))


def counters_table() -> str:
    """The counters by the names that Prometheus, Python and JSON have for them."""
    lines = ["| Prometheus | `stats`, JSON | meaning |", "|---|---|---|"]
    lines += [f"| `{PREFIX}{name}_total` | `{name}` | {said} |" for name, said in COUNTERS.items()]
    lines += [f"| `{PREFIX}{name}`, a gauge | `{name}` | {said} |" for name, said in GAUGES.items()]
    return "\n".join(lines)


def decisions() -> str:
    """Links to all of them, by their headings."""
    found = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    titles = (re.sub(r"^# ", "", page.read_text().split("\n")[0]) for page in found)
    return "\n".join(f"- [{t}]({p.name})" for t, p in zip(titles, found, strict=True))


def main() -> None:
    for name, contents in blocks().items():
        page = ROOT / name
        page.write_text(filled(page.read_text(), contents))
    claims.PAGE.write_text(claims.page())
    troubleshooting.PAGE.write_text(troubleshooting.page())


if __name__ == "__main__":
    main()
