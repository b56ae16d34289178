"""Which weights a recipe converts, and why each of the others stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from requant.dialects.recognise import Weight, is_bank
from requant.errors import Problem
from requant.families.roles import Templates, role_of
from requant.formats import FORMATS
from requant.recipe.patterns import LINEAR, PatternSet
from requant.recipe.recipe import Recipe


@dataclass(slots=True)
class Selection:
    """What a recipe makes of an inventory.

    ``converted`` weights change their format; ``already`` are selected, too, but lie in the target format as
    they are; ``kept`` are left alone. ``kept_reasons`` counts why weights keep their bytes.
    """

    converted: list[Weight] = field(default_factory=list)
    already: list[Weight] = field(default_factory=list)
    kept: list[Weight] = field(default_factory=list)
    kept_reasons: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def select(weights: list[Weight], recipe: Recipe, experts: int | None) -> Selection:
    """Apply targets, ignore and the default keeps to an inventory's weights.

    ``Linear`` is every 2-D weight but the default keeps; a target that names a default-kept module overrides
    them; ``ignore`` has the last word. Indivisible shapes, unknown formats, targets that name something not
    2-D and targets that match nothing are problems.
    """
    found = Selection()
    chooser = _Chooser(recipe, experts)
    target = recipe.scheme.format
    for weight in weights:
        reason = chooser.keep_reason(weight)
        if not reason and weight.format != target and _divides(weight, target):
            found.converted.append(weight)
            continue
        fault = None if reason in ("ignore", "not-targeted") else _fault(weight, recipe, reason)
        if fault is not None:
            found.problems.append(fault)
        elif not reason:
            reason = f"already-{recipe.scheme.name}"
            found.already.append(weight)
        if not reason.startswith("already-"):
            found.kept.append(weight)
        found.kept_reasons[reason] += 1
    chooser.report(found, weights)
    if not (found.converted or found.already or found.problems):
        message = "nothing is left to convert: every weight is ignored or kept"
        remedy = "loosen --ignore or name a --target"
        found.problems.append(Problem("target-matches-nothing", message, remedy=remedy))
    return found


class _Chooser:
    """Applies the patterns, and remembers which of them were of use."""

    def __init__(self, recipe: Recipe, experts: int | None) -> None:
        self._recipe, self._experts = recipe, experts
        self._linear = any(pattern.text == LINEAR for pattern in recipe.targets)
        self._named = PatternSet(pattern for pattern in recipe.targets if pattern.text != LINEAR)
        self._ignore = PatternSet(recipe.ignore)
        self._templates = Templates()
        self._used: set[str] = set()
        self._overridden: Counter[str] = Counter()

    def keep_reason(self, weight: Weight) -> str:
        """Return why a weight stays as it is; "" if it is selected."""
        ignored = self._ignore.first(weight.module)
        if ignored is not None:
            self._used.add(ignored.text)
            return "ignore"
        named = self._named.first(weight.module) if self._named else None
        if named is None and not self._linear:
            return "not-targeted"
        keep = role_of(self._templates.of(weight.module), weight.shape, self._experts).keep
        if named is not None:
            self._used.add(named.text)
            if keep and len(weight.shape) == 2:
                self._overridden[keep] += 1
                keep = ""
        return keep or ("empty" if 0 in weight.shape else "")

    def report(self, found: Selection, weights: Iterable[Weight]) -> None:
        """Add what there is to say about the patterns themselves."""
        for role, count in self._overridden.items():
            found.notes.append(f"{count} {role} weights, kept by default, are named by a target")
        for pattern in self._recipe.ignore:
            if pattern.text not in self._used and not any(pattern.matches(weight.module) for weight in weights):
                found.notes.append(f"ignore {pattern.text!r} matches nothing")
        for pattern in self._recipe.targets:
            if pattern.text == LINEAR or pattern.text in self._used:
                continue
            if not any(pattern.matches(weight.module) for weight in weights):
                message = f"target {pattern.text!r} matches no weight"
                remedy = "compare with `requant inspect`"
                found.problems.append(Problem("target-matches-nothing", message, remedy=remedy))


def _fault(weight: Weight, recipe: Recipe, keep: str) -> Problem | None:
    """Return what stands in the way of a weight that nobody has asked to leave alone."""
    module, shape, scheme = weight.module, list(weight.shape), recipe.scheme
    if is_bank(module, weight.shape):
        message = f"{shape} in {weight.parts[0].shard}: all experts of a layer in one tensor, which is not divided yet"
        return Problem("unknown-format", message, module, "--ignore it")
    if not weight.format and (not keep or len(weight.parts) > 1):  # one part is a tensor of some dtype, to be kept
        parts = ", ".join(f"{part.name} {part.dtype} {list(part.shape)} in {part.shard}" for part in weight.parts)
        return Problem("unknown-format", f"no known format has these parts: {parts}", module, "--ignore it")
    if keep == "not-2d" and any(pattern.text == module for pattern in recipe.targets):
        message = f"a target names it, but it is {shape} (in {weight.parts[0].shard})"
        return Problem("not-2d", message, module, "only 2-D weights are converted; drop the target")
    if not keep and weight.format != scheme.format:
        multiple = FORMATS[scheme.format].multiple
        message = f"{shape} in {weight.parts[0].shard}: {scheme.name} needs columns in multiples of {multiple}"
        return Problem("indivisible", message, module, "--ignore it")
    return None


def _divides(weight: Weight, target: str) -> bool:
    return bool(weight.format) and len(weight.shape) == 2 and weight.shape[1] % FORMATS[target].multiple == 0
