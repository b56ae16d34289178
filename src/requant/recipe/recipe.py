"""A recipe: the wish that ``--scheme``, ``--target`` and ``--ignore`` spell out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from requant.errors import CallError, Problem
from requant.recipe.patterns import LINEAR, Pattern, compile_patterns
from requant.schemes import SCHEMES, Scheme

Exact = Literal["auto", "off", "required"]
OverSpan = Literal["round", "refuse"]
Arithmetic = Literal["reference", "float32"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What becomes of which weights.

    ``exact``: take exact routes where they exist (auto), never (off), or refuse any rounding of a microscaled
    source (required). ``on_over_span``: what an exact route does with a region that it cannot hold.
    ``arithmetic``: LLM Compressor's, in the weight's dtype, or float32 for everything that rounds.
    """

    scheme: Scheme
    targets: tuple[Pattern, ...]
    ignore: tuple[Pattern, ...]
    exact: Exact = "auto"
    on_over_span: OverSpan = "round"
    arithmetic: Arithmetic = "reference"


def make_recipe(
    scheme: str,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    exact: Exact = "auto",
    on_over_span: OverSpan = "round",
    arithmetic: Arithmetic = "reference",
) -> Recipe:
    """Build a recipe from the words of a call; CallError lists everything that is wrong with them."""
    problems = []
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        problems.append(Problem("bad-option", f"unknown scheme {scheme!r}", remedy=f"one of {', '.join(SCHEMES)}"))
    for option, value, choices in (
        ("exact", exact, get_args(Exact)),
        ("on-over-span", on_over_span, get_args(OverSpan)),
        ("arithmetic", arithmetic, get_args(Arithmetic)),
    ):
        if value not in choices:
            problems.append(Problem("bad-option", f"{option} {value!r}", remedy=f"one of {', '.join(choices)}"))
    try:
        patterns = compile_patterns([*(targets or (LINEAR,)), *ignore])
    except CallError as error:
        problems += error.problems
    if problems:
        raise CallError(problems)
    count = len(targets) or 1
    return Recipe(SCHEMES[scheme], patterns[:count], patterns[count:], exact, on_over_span, arithmetic)
