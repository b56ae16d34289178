"""Selecting: what a recipe makes of every weight, and what in it cannot be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from requant.dialects import OUTPUT_DIALECTS
from requant.dialects.recognise import Weight
from requant.errors import Problem
from requant.families.roles import Role, Templates, role_of
from requant.formats import PackedInt, format_named
from requant.formats.packed_int import CHANNEL
from requant.recipe.patterns import LINEAR, first_matches
from requant.recipe.recipe import Recipe, Rule
from requant.schemes import SCHEMES, Scheme


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What one converting rule asks for: a scheme, in the format that the output's dialect has for it."""

    scheme: Scheme
    format: str
    rule: Rule


@dataclass(slots=True)
class Selection:
    """What a recipe makes of an inventory.

    ``converted`` weights change their format, ``respelled`` ones only the names and the company of their parts,
    ``already`` are selected, too, but lie in the target format as they are; ``kept`` are left alone.
    ``kept_reasons`` counts why weights keep their bytes.
    """

    converted: dict[Target, list[Weight]] = field(default_factory=dict)
    respelled: dict[Target, list[Weight]] = field(default_factory=dict)
    already: dict[Target, list[Weight]] = field(default_factory=dict)
    kept: list[Weight] = field(default_factory=list)
    kept_reasons: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def under_schemes(self) -> Iterable[tuple[Target, list[Weight]]]:
        """Yield the weights that lie under a target's scheme in the output."""
        for selected in (self.converted, self.respelled, self.already):
            yield from selected.items()


def select(weights: list[Weight], recipe: Recipe, experts: int | None) -> Selection:
    """Apply the rules and the default keeps to an inventory's weights.

    ``Linear`` is every 2-D weight but the default keeps; a pattern that names a default-kept module overrides
    them. Indivisible shapes, unknown formats, patterns of converting rules that name something not 2-D or match
    nothing are problems.
    """
    found = Selection()
    targets = _targets(recipe)
    decoding = _decoding(targets.values(), weights)
    chooser = _Chooser(recipe, weights, experts)
    widths = {target: format_named(target.format).multiple for target in (*targets.values(), *decoding.values())}
    for target in widths:
        found.converted[target], found.respelled[target], found.already[target] = [], [], []
    for weight in weights:
        rule, reason = chooser.choose(weight)
        if not reason and weight.format and len(weight.shape) == 2:
            target, bank = targets[id(rule)], weight.bank
            turned = False
            if bank is not None:
                target = decoding[target] if bank.whole else target
                turned = bank.stride > 0 and weight.format != "dense"
            if turned or not (weight.format == target.format or _is_same_integer(weight, target)):
                if weight.shape[1] % widths[target] == 0:
                    found.converted[target].append(weight)
                    continue
            elif _as_written(weight, target, recipe):
                found.already[target].append(weight)
                found.kept_reasons[f"already-{target.scheme.name}"] += 1
                continue
            else:
                found.respelled[target].append(weight)
                continue
        fault = _fault(weight, rule, reason)
        if fault is not None:
            found.problems.append(fault)
        found.kept.append(weight)
        found.kept_reasons[reason] += 1
    chooser.report(found, weights)
    for target, other in decoding.items():
        count = len(found.converted[other])
        if count and target is not other:
            found.notes.append(
                f"{count} experts' weights are decoded to {other.scheme.name}: they lie in banks that engines load as "
                f"a whole, and none does under {target.scheme.name} (--ignore them to keep them as they are)"
            )
    if not (found.problems or any(some for _, some in found.under_schemes())):
        message = "nothing is left to convert: every weight is ignored or kept"
        remedy = "loosen --ignore or name a --target"
        found.problems.append(Problem("target-matches-nothing", message, remedy=remedy))
    return found


def _targets(recipe: Recipe) -> dict[int, Target]:
    """Return the target of every converting rule, by the rule's identity."""
    replaced = OUTPUT_DIALECTS[recipe.dialect].formats
    return {
        id(rule): Target(rule.scheme, replaced.get(rule.scheme.format, rule.scheme.format), rule)
        for rule in recipe.rules
        if rule.scheme is not None
    }


def _decoding(targets: Collection[Target], weights: Iterable[Weight]) -> dict[Target, Target]:
    """Return what takes each target's place for weights in banks that engines load as a whole; {} without any."""
    if not any(weight.bank is not None and weight.bank.whole for weight in weights):
        return {}
    unquantized = SCHEMES["BF16"]
    return {
        target: target if target.format == "dense" else Target(unquantized, unquantized.format, target.rule)
        for target in targets
    }


class _Chooser:
    """Applies the rules, and remembers which of their patterns were of use."""

    def __init__(self, recipe: Recipe, weights: Sequence[Weight], experts: int | None) -> None:
        self._recipe, self._experts = recipe, experts
        modules = [weight.module for weight in weights]
        self._steps = [
            (
                rule,
                first_matches([pattern for pattern in rule.patterns if pattern.text != LINEAR], modules),
                any(pattern.text == LINEAR for pattern in rule.patterns),
            )
            for rule in recipe.rules
        ]
        self._roles: dict[tuple[str, str, tuple[int, ...]], Role] = {}
        self._templates = Templates()
        self._used: set[str] = set()
        self._reached: set[int] = set()
        self._overridden: Counter[str] = Counter()

    def choose(self, weight: Weight) -> tuple[Rule | None, str]:
        """Return the rule that holds for a weight (None: none does) and why it stays as it is ("": it does not)."""
        module, _, shape, *_ = weight
        for rule, named, linear in self._steps:
            pattern = named.get(module)
            if pattern is not None:
                self._used.add(pattern.text)
            elif not linear and not (rule.roles and self._role(module, shape).name in rule.roles):
                continue
            if self._recipe.name is not None:
                self._reached.add(id(rule))
            if rule.scheme is None:
                return rule, rule.reason
            keep = self._role(module, shape).keep
            if keep and pattern is not None and len(shape) == 2:
                self._overridden[keep] += 1
                keep = ""
            return rule, keep or ("empty" if 0 in shape else "")
        return None, "not-targeted"

    def _role(self, module: str, shape: tuple[int, ...]) -> Role:
        """Return the role of a module; thought about once for all that differ in their numbers only."""
        parent, _, leaf = module.rpartition(".")
        key = self._templates.of(parent), leaf, shape
        role = self._roles.get(key)
        if role is None:
            role = self._roles[key] = role_of(self._templates.of(module), shape, self._experts)
        return role

    def report(self, found: Selection, weights: Iterable[Weight]) -> None:
        """Add what there is to say about the patterns themselves."""
        for role, count in self._overridden.items():
            found.notes.append(f"{count} {role} weights, kept by default, are named by a target")
        if self._recipe.name is not None:
            found.problems += [
                Problem(
                    "target-matches-nothing",
                    f"rule {place} of the recipe {self._recipe.name} ({rule.scheme.name}) names no weight",
                    remedy="is it meant for this model? Compare with `requant inspect`",
                )
                for place, rule in enumerate(self._recipe.rules, start=1)
                if rule.scheme is not None and id(rule) not in self._reached
            ]
            return
        for rule, pattern in ((step, pattern) for step in self._recipe.rules for pattern in step.patterns):
            if pattern.text == LINEAR or pattern.text in self._used:
                continue
            if any(pattern.matches(weight.module) for weight in weights):
                continue
            if rule.scheme is None:
                found.notes.append(f"ignore {pattern.text!r} matches nothing")
            else:
                message = f"target {pattern.text!r} matches no weight"
                remedy = "compare with `requant inspect`"
                found.problems.append(Problem("target-matches-nothing", message, remedy=remedy))


def _is_same_integer(weight: Weight, target: Target) -> bool:
    """Tell whether a weight lies in the target's format under another name: integers whose group is the whole row."""
    if not weight.format.startswith("int"):
        return False
    stored, wanted = PackedInt.named(weight.format), PackedInt.named(target.format)
    if stored is None or wanted is None or stored.group != CHANNEL:
        return False
    return (stored.bits, weight.shape[1], stored.symmetric) == (wanted.bits, wanted.group, wanted.symmetric)


def _as_written(weight: Weight, target: Target, recipe: Recipe) -> bool:
    """Tell whether a weight in the target's format is spelled, and accompanied, as the output wants it."""
    if target.format == "dense":
        return True
    if weight.dialect != recipe.dialect or bool(weight.inputs) != target.scheme.stores_input_scale:
        return False
    return not (weight.inputs and recipe.input_scale.overrides)


def _fault(weight: Weight, rule: Rule | None, keep: str) -> Problem | None:
    """Return what stands in the way of a weight that nobody has asked to leave alone."""
    if rule is None or rule.scheme is None:
        return None
    module, shape, scheme = weight.module, list(weight.shape), rule.scheme
    if weight.bank is not None and weight.bank.refusal:
        message = f"{shape} in {weight.parts[0].shard}: experts in one tensor, {weight.bank.refusal}"
        remedy = "--ignore it, or say with --family what its model is"
        return Problem("unknown-format", message, module, remedy)
    if not weight.format and (not keep or len(weight.parts) > 1):  # one part is a tensor of some dtype, to be kept
        parts = ", ".join(f"{part.name} {part.dtype} {list(part.shape)} in {part.shard}" for part in weight.parts)
        if len(weight.parts) == 1 and weight.parts[0].dtype == "I8":  # a table of bytes that stays would be kept
            return Problem("missing-part", f"no scale beside {parts}", module, "restore its scale, or --ignore it")
        return Problem("unknown-format", f"no known format has these parts: {parts}", module, "--ignore it")
    if keep == "not-2d" and any(pattern.text == module for pattern in rule.patterns):
        message = f"a target names it, but it is {shape} (in {weight.parts[0].shard})"
        return Problem("not-2d", message, module, "only 2-D weights are converted; drop the target")
    if not keep:
        multiple = format_named(scheme.format).multiple
        message = f"{shape} in {weight.parts[0].shard}: {scheme.name} needs columns in multiples of {multiple}"
        return Problem("indivisible", message, module, "--ignore it")
    return None
