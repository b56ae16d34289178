"""A recipe: which modules become what, and how strictly; ``--scheme``, ``--target`` and ``--ignore`` spell one out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from requant.dialects import OUTPUT_DIALECTS, Dialect
from requant.errors import CallError, Problem
from requant.families.family import Family, family_named
from requant.formats import ScaleRule
from requant.recipe.input_scale import NO_CALIBRATION, InputScaleSource, parse_input_scale
from requant.recipe.patterns import LINEAR, Pattern, compile_patterns
from requant.recipe.size import parse_size
from requant.schemes import SCHEMES, Scheme, can_write, scheme_named

Exact = Literal["auto", "off", "required"]
OverSpan = Literal["round", "refuse"]
Arithmetic = Literal["reference", "float32"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of the modules that ``patterns`` name: they go under ``scheme``, or (None) stay as they are.

    ``exact``: take exact routes where they exist (auto), never (off), or refuse any rounding of a microscaled
    source (required). ``reason`` says why modules are kept. ``roles`` (of `requant.families.roles`) name modules, too.
    """

    patterns: tuple[Pattern, ...]
    scheme: Scheme | None
    exact: Exact = "auto"
    reason: str = ""
    roles: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Recipe:
    """Ordered rules, of which the first that names a module holds, and how the work is done.

    ``on_over_span``: what an exact route does with a region that it cannot hold. ``arithmetic``: LLM
    Compressor's, in the weight's dtype, or float32 for everything that rounds. ``scale``: how scales are found.
    ``dialect`` is that of the output, ``family`` stands in for the one that config.json names. Shards of more than
    ``max_shard_size`` bytes of data are split (None: none is). One from a file has a ``name``, and may say for which
    ``engine`` it is meant.
    """

    rules: tuple[Rule, ...]
    on_over_span: OverSpan = "round"
    arithmetic: Arithmetic = "reference"
    scale: ScaleRule = "amax"
    input_scale: InputScaleSource = NO_CALIBRATION
    dialect: str = "compressed-tensors"
    family: Family | None = None
    max_shard_size: int | None = None
    name: str | None = None
    engine: str | None = None

    @property
    def refuses_over_span(self) -> bool:
        """Whether a value that an exact route cannot hold stops the job."""
        return self.on_over_span == "refuse" or any(rule.exact == "required" for rule in self.rules)

    def to_json(self) -> dict[str, Any]:
        """Return everything that makes this recipe differ from another."""
        rules = [
            [
                [pattern.text for pattern in rule.patterns],
                sorted(rule.roles),
                rule.scheme and rule.scheme.name,
                rule.exact,
            ]
            for rule in self.rules
        ]
        source = self.input_scale
        return {
            "rules": rules,
            "on_over_span": self.on_over_span,
            "arithmetic": self.arithmetic,
            "scale": self.scale,
            "input_scale": [source.kind, source.value, str(source.path)],
            "dialect": self.dialect,
            "family": self.family and [self.family.fused, self.family.dense_bank, self.family.expert_dtype],
            "max_shard_size": self.max_shard_size,
        }


def make_recipe(
    scheme: str,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    exact: Exact = "auto",
    on_over_span: OverSpan = "round",
    arithmetic: Arithmetic = "reference",
    scale: ScaleRule = "amax",
    input_scale: str = "constant:1.0",
    dialect: str = "compressed-tensors",
    family: str | None = None,
    max_shard_size: str | int | None = None,
) -> Recipe:
    """Build a recipe from the words of a call; CallError lists everything that is wrong with them."""
    problems: list[Problem] = []
    preset = scheme_named(scheme) if isinstance(scheme, str) else None
    if preset is None:
        remedy = f"one of {', '.join(SCHEMES)}, or with a group's size W4A16_G32"
        problems.append(Problem("bad-option", f"unknown scheme {scheme!r}", remedy=remedy))
    for option, value, choices in (
        ("exact", exact, get_args(Exact)),
        ("on-over-span", on_over_span, get_args(OverSpan)),
        ("arithmetic", arithmetic, get_args(Arithmetic)),
        ("scale", scale, get_args(ScaleRule)),
        ("dialect", dialect, tuple(OUTPUT_DIALECTS)),
    ):
        if value not in choices:
            problems.append(Problem("bad-option", f"{option} {value!r}", remedy=f"one of {', '.join(choices)}"))
    patterns: tuple[Pattern, ...] = ()
    source = NO_CALIBRATION
    facts = None
    largest = None
    try:
        largest = None if max_shard_size is None else parse_size("max-shard-size", max_shard_size)
    except CallError as error:
        problems += error.problems
    try:
        patterns = compile_patterns([*(targets or (LINEAR,)), *ignore])
    except CallError as error:
        problems += error.problems
    try:
        source = parse_input_scale(input_scale)
    except CallError as error:
        problems += error.problems
    try:
        facts = None if family is None else family_named(family)
    except CallError as error:
        problems += error.problems
    if preset is not None and dialect in OUTPUT_DIALECTS:
        problems += unspeakable(preset, OUTPUT_DIALECTS[dialect])
    if problems or preset is None:
        raise CallError(problems)
    count = len(targets) or 1
    rules = (Rule(patterns[count:], None, reason="ignore"), Rule(patterns[:count], preset, exact))
    return Recipe(rules, on_over_span, arithmetic, scale, source, dialect, facts, largest)


def adapted(recipe: Recipe, **options: Any) -> Recipe:
    """Return a recipe with the words of a call in place of its own where they are not the defaults."""
    words = make_recipe("BF16", **options)  # checks them
    plain = Recipe(())
    changed = {
        name: getattr(words, name)
        for name in ("on_over_span", "arithmetic", "scale", "input_scale", "dialect", "family", "max_shard_size")
        if getattr(words, name) != getattr(plain, name)
    }
    rules = recipe.rules
    if words.rules[-1].exact != "auto":
        rules = tuple(replace(rule, exact=words.rules[-1].exact) for rule in rules)
    found = replace(recipe, rules=rules, **changed)
    schemes = {rule.scheme.name: rule.scheme for rule in rules if rule.scheme is not None}
    problems = [fault for scheme in schemes.values() for fault in unspeakable(scheme, OUTPUT_DIALECTS[found.dialect])]
    if problems:
        raise CallError(problems)
    return found


def unspeakable(scheme: Scheme, dialect: Dialect) -> list[Problem]:
    """Return the problem of a scheme that a dialect has no way to write."""
    if can_write(dialect, scheme):
        return []
    can = [name for name, other in SCHEMES.items() if can_write(dialect, other)]
    message = f"the dialect {dialect.name} has no way to write {scheme.name}"
    return [Problem("bad-option", message, remedy=f"it has {', '.join(can)}")]
