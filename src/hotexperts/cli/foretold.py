"""Options of `hotexperts simulate` that say how to prefetch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hotexperts.cli import lists, options
from hotexperts.errors import ConfigError

if TYPE_CHECKING:
    from hotexperts.simulate import foretell, prefetch

PREDICTORS = (  # named here too, as the help needs no NumPy
    *("combined", "cross-lift", "cross-markov", "ewma", "gate", "logistic", "oracle"),
    *("popularity", "previous", "request-map", "stride", "temporal-lift", "temporal-markov"),
)
_TAPS = ("output", "input")
_SLACKS = ("compute", "unlimited")
_AHEAD, _RATIO, _MOE_SHARE = 1, 1.5, 0.5

Predictors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Replay each policy again with experts fetched before they are asked for, guessed by "
        f"{', '.join(PREDICTORS)} or 'module:Class' (docs/prefetch.md). {lists.HELP}",
        show_default="none",
    ),
]
Ahead = Annotated[
    int,
    typer.Option(metavar="N", help="Layers from where a guess is made to the one it is for."),
]
Tap = Annotated[
    str,
    typer.Option(
        metavar="|".join(_TAPS),
        help="Guess after a layer's experts (output), or before them (input): earlier, and "
        "knowing less.",
    ),
]
Budget = Annotated[
    list[str] | None,
    typer.Option(
        metavar="Nx|SIZE",
        help="Transfer at most N times the bytes of no prefetch in all, at most a size such as "
        "20MB for one layer's call, or, by a comma, both.",
        show_default=f"{_RATIO:g}x",
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Staging rows: guesses for one layer's call.",
        show_default="twice the experts of a token",
    ),
]
Slack = Annotated[
    str,
    typer.Option(
        metavar="|".join(_SLACKS),
        help="Hide transfers behind --compute-ms alone (compute), or all of them (unlimited).",
    ),
]
MoeShare = Annotated[
    float,
    typer.Option(metavar="X", help="Part of --compute-ms that is a layer's experts', 0 to 1."),
]


def settings(
    predictors: list[str],
    ahead: int,
    tap: str,
    budget: list[str] | None,
    rows: int | None,
    slack: str,
) -> prefetch.Prefetch:
    """What the options say.

    Raises:
        ConfigError: a value that is none, or one that matters to prefetch alone without predictors.
    """
    from hotexperts.simulate.prefetch import Prefetch

    given = {
        "ahead": ahead != _AHEAD,
        "tap": tap != _TAPS[0],
        "budget": budget is not None,
        "rows": rows is not None,
        "slack": slack != _SLACKS[0],
    }
    for name in (name for name, is_given in given.items() if is_given and not predictors):
        raise ConfigError(
            f"--prefetch-{name} without --prefetch: name a predictor, or leave it out"
        )
    lists.check_choice("--prefetch-tap", tap, _TAPS)
    lists.check_choice("--prefetch-slack", slack, _SLACKS)
    ratio, call_nbytes = _budget(lists.split("--prefetch-budget", budget, (f"{_RATIO:g}x",)))
    return Prefetch(
        ahead, cast("foretell.Tap", tap), rows, ratio, call_nbytes, cast("prefetch.Slack", slack)
    )


def check_beside(predictors: list[str], moe_share: float, plot: str | None) -> None:
    """Refuse what does not go with predictors, or not without.

    Raises:
        ConfigError: a share without predictors, or a plot with them.
    """
    if not predictors and moe_share != _MOE_SHARE:
        raise ConfigError("--moe-share without --prefetch: name a predictor, or leave it out")
    if predictors and plot is not None:
        raise ConfigError(
            "--plot draws the cache's own hits, which --prefetch leaves as they are: give one of "
            "the two"
        )


def _budget(values: list[str]) -> tuple[float | None, int | None]:
    ratios = [value for value in values if value.endswith("x")]
    sizes = [value for value in values if not value.endswith("x")]
    if len(ratios) > 1 or len(sizes) > 1:
        raise ConfigError(f"--prefetch-budget {','.join(values)}: give one Nx, one size, or both")
    num_bytes = options.nbytes("--prefetch-budget", sizes[0]) if sizes else None
    return _ratio(ratios[0]) if ratios else None, num_bytes


def _ratio(text: str) -> float:
    try:
        found = float(text[:-1])
    except ValueError:
        found = math.nan
    if not 1 <= found < math.inf:
        raise ConfigError(f"--prefetch-budget {text!r:.60}: give 1x or more, such as {_RATIO:g}x")
    return found
