"""Options that commands share: which each has, in which order, and what it is given of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from hotexperts.cli import groups
from hotexperts.cli.expert_options import EXPERTS
from hotexperts.cli.main import app

ON_DISK = ["expert_store", "expert_ram_gib", "expert_ram_policy", "expert_pack"]
ALL_BUT_DTYPE = [*ON_DISK, "expert_packing", "cache_mode", "prefetch"]
ALL = [*ON_DISK, "expert_packing", "expert_dtype", "cache_mode", "prefetch"]


@pytest.mark.parametrize(
    ("command", "before", "options", "after"),
    [
        ("run", "device", ALL, "dtype"),
        ("serve", "device", ALL, "max_requests"),
        ("verify", "policy", ALL_BUT_DTYPE, "tolerance"),
        ("bench", "device", ALL_BUT_DTYPE, "dtype"),
        ("trace", "device", [*ON_DISK, "cache_mode"], "dtype"),
    ],
)
def test_each_command_has_its_options_of_experts_in_their_place(
    command: str, before: str, options: list[str], after: str
) -> None:
    found = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    names = [parameter.name for parameter in found]
    start = names.index(before)
    assert names[start : start + len(options) + 2] == [before, *options, after]
    given = {parameter.name: parameter.default for parameter in found}
    assert {name: given[name] for name in options} == {
        name: getattr(EXPERTS, name) for name in options
    }


@dataclass(frozen=True)
class Link:
    gb_s: Annotated[float, typer.Option(help="Of the link.")] = 55.0
    lanes: Annotated[int, typer.Option(help="Of the slot.")] = 16


LINK = Link()


def said_of(*argv: str) -> list[object]:
    app, said = typer.Typer(), []

    @app.command()
    @groups.expanded
    def probe(
        name: str,
        link: Link = LINK,
        fewer: Annotated[Link, groups.without("gb_s", "lanes")] = LINK,
        seed: int = 0,
    ) -> None:
        """Some words."""
        said.extend([name, link, fewer, seed])

    done = CliRunner().invoke(app, argv)
    said.append(done.output)
    return said


def test_a_command_gets_a_group_as_one_value() -> None:
    assert said_of("x", "--lanes", "4", "--seed", "3") == ["x", Link(55.0, 4), LINK, 3, ""]


def test_what_a_command_has_not_is_no_option_of_it() -> None:
    help_ = str(said_of("--help")[0])
    assert help_.index("Some words.") < help_.index("--gb-s") < help_.index("--seed")
    assert "--link" not in help_
    assert "--fewer" not in help_
