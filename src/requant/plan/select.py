"""Which weights a recipe converts, and why each of the others stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from requant.dialects.recognise import Weight
from requant.errors import Problem
from requant.families.roles import role_of, template
from requant.formats import FORMATS
from requant.recipe.patterns import LINEAR, PatternSet
from requant.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Selection:
    """The weights to convert, those that stay, and for how many of these each reason held."""

    converted: list[Weight]
    kept: list[Weight]
    kept_reasons: dict[str, int]
    problems: list[Problem]
    notes: list[str]


def select(weights: Iterable[Weight], recipe: Recipe, experts: int | None) -> Selection:
    """Apply targets, ignore and the default keeps to an inventory's weights.

    ``Linear`` is every 2-D weight but the default keeps; a target that names a default-kept module overrides
    them; ``ignore`` has the last word. Indivisible shapes, unknown formats, targets that name something not
    2-D and targets that match nothing are problems.
    """
    target = recipe.scheme.format
    multiple = FORMATS[target].multiple
    linear = any(pattern.text == LINEAR for pattern in recipe.targets)
    by_name = [pattern for pattern in recipe.targets if pattern.text != LINEAR]
    named, ignore = PatternSet(by_name), PatternSet(recipe.ignore)
    unmatched = {pattern.text: pattern for pattern in (*by_name, *recipe.ignore)}
    converted: list[Weight] = []
    kept: list[Weight] = []
    ignored: list[Weight] = []
    reasons: Counter[str] = Counter()
    overridden: Counter[str] = Counter()
    problems: list[Problem] = []
    for weight in weights:
        module, shape = weight.module, weight.shape
        hit = ignore.first(module)
        if hit is not None:
            unmatched.pop(hit.text, None)
            ignored.append(weight)
            reasons["ignore"] += 1
            continue
        naming = named.first(module)
        if naming is None and not linear:
            reasons["not-targeted"] += 1
            kept.append(weight)
            continue
        keep = role_of(template(module), shape, experts).keep
        if naming is not None:
            unmatched.pop(naming.text, None)
            if naming.regex is None and len(shape) != 2:
                problems.append(_not_2d(weight))
            if keep and len(shape) == 2:
                overridden[keep] += 1
                keep = ""
        if not keep and 0 in shape:
            keep = "empty"
        if not keep and weight.format == target:
            keep = f"already-{recipe.scheme.name}"
        if not weight.format:
            problems.append(_unknown_format(weight))
        elif not keep and shape[1] % multiple:
            problems.append(_indivisible(weight, multiple, recipe.scheme.name))
        elif not keep:
            converted.append(weight)
            continue
        reasons[keep or "problem"] += 1
        kept.append(weight)
    kept += ignored
    notes = [f"{count} {role} weights, kept by default, are named by a target" for role, count in overridden.items()]
    for pattern in unmatched.values():
        if pattern in recipe.ignore:
            if not any(pattern.matches(weight.module) for weight in ignored):
                notes.append(f"ignore {pattern.text!r} matches nothing")
        elif not any(pattern.matches(weight.module) for weight in (*converted, *kept)):
            message = f"target {pattern.text!r} matches no weight"
            problems.append(Problem("target-matches-nothing", message, remedy="compare with `requant inspect`"))
    if not converted and not problems and not any(reason.startswith("already") for reason in reasons):
        message = "nothing is left to convert: every weight is ignored or kept"
        problems.append(Problem("target-matches-nothing", message, remedy="loosen --ignore or name a --target"))
    return Selection(converted, kept, dict(reasons), problems, notes)


def _not_2d(weight: Weight) -> Problem:
    message = f"a target names it, but it is {list(weight.shape)} (in {weight.parts[0].shard})"
    return Problem("not-2d", message, weight.module, "only 2-D weights are converted; drop the target")


def _unknown_format(weight: Weight) -> Problem:
    parts = ", ".join(f"{part.name} {part.dtype} {list(part.shape)} in {part.shard}" for part in weight.parts)
    return Problem("unknown-format", f"no known format has these parts: {parts}", weight.module, "--ignore it")


def _indivisible(weight: Weight, multiple: int, scheme: str) -> Problem:
    message = f"{list(weight.shape)} in {weight.parts[0].shard}: {scheme} needs columns in multiples of {multiple}"
    return Problem("indivisible", message, weight.module, "--ignore it")
