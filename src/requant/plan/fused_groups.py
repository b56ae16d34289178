"""Fused groups in a selection: who pools a number with whom, and which group a recipe would tear apart."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from requant.dialects.recognise import Weight
from requant.errors import Problem
from requant.families.family import Family, fused_groups
from requant.plan.select import Selection, Target
from requant.schemes import scheme_of

_POOLED = frozenset({"nvfp4", "nvfp4-scale2"})
"""Formats with a number that the members of a fused group share."""


def fused_members(
    selection: Selection, family: Family | None, model_type: str | None, pooled: Container[str] = ()
) -> tuple[dict[str, str], list[Problem]]:
    """Return module → fused group for the weights that share a scale with their group, and what is wrong.

    Only NVFP4's global scale is shared: engines keep one of a fused layer's. Without facts on the model's family
    it cannot be known with whom. Of the modules in ``pooled`` the shared number is known, whatever became of the rest
    of their groups.
    """
    pooling = [
        weight.module
        for target, weights in selection.converted.items()
        if target.format in _POOLED
        for weight in weights
    ]
    if not pooling:
        return {}, []
    if family is None:
        message = f"which modules engines fuse is not known for the model type {model_type!r}"
        remedy = "--family generic if q/k/v and gate/up are all, or --family FILE as `requant family init` drafts it"
        return {}, [Problem("fused-split", message, "config.json", remedy)]
    groups = fused_groups(pooling, family)
    pooling = [module for module in pooling if module not in pooled]
    lying = (*selection.respelled.values(), *selection.already.values(), selection.kept)
    fixed = [weight.module for weights in lying for weight in weights if weight.format in _POOLED]
    return groups, _joined_late(pooling, fixed, family) if fixed else []


def _joined_late(pooling: Iterable[str], fixed: Iterable[str], family: Family) -> list[Problem]:
    """Return a problem for every group of which some members have a global scale already, and others need one."""
    is_fixed = {**dict.fromkeys(pooling, False), **dict.fromkeys(fixed, True)}
    members: dict[str, list[str]] = {}
    for module, group in fused_groups(is_fixed, family).items():
        members.setdefault(group, []).append(module)
    problems = []
    for together in members.values():
        have = sorted(module.rpartition(".")[2] for module in together if is_fixed[module])
        if have and len(have) < len(together):
            message = f"engines fuse it with {', '.join(have)}, whose global scale is fixed already and not its own"
            module = min(module for module in together if not is_fixed[module])
            problems.append(Problem("fused-split", message, module, "convert all of them from one source"))
    return problems


def split_groups(selection: Selection, family: Family | None) -> list[Problem]:
    """Return a problem for every fused group that a rule reaches and that would not be under one scheme."""
    if family is None:
        return []
    schemes: dict[str, str] = {weight.module: _kept_name(weight) for weight in selection.kept if len(weight.shape) == 2}
    several = sum(1 for _, weights in selection.under_schemes() if weights) > 1
    reached: set[str] = set()
    parents = None if several else {module.rpartition(".")[0] for module in schemes}
    for target, weights in selection.under_schemes():
        name = _scheme_name(target)
        for weight in weights:
            if parents is None or weight.module.rpartition(".")[0] in parents:
                schemes[weight.module] = name
                reached.add(weight.module)
    members: dict[str, list[str]] = {}
    for module, group in fused_groups(schemes, family).items():
        members.setdefault(group, []).append(module)
    return [
        _split(together, schemes)
        for together in members.values()
        if len({schemes[module] for module in together}) > 1 and not reached.isdisjoint(together)
    ]


def _kept_name(weight: Weight) -> str:
    if weight.format == "dense":
        return "unquantized"
    scheme = scheme_of(weight.format, stores_input_scale=bool(weight.inputs))
    return weight.format if scheme is None else scheme.name


def _scheme_name(target: Target) -> str:
    return "unquantized" if target.format == "dense" else target.scheme.name


def _split(members: list[str], schemes: Mapping[str, str]) -> Problem:
    what = ", ".join(f"{module.rpartition('.')[2]}: {schemes[module]}" for module in sorted(members))
    message = f"engines fuse these into one layer, which cannot have two schemes ({what})"
    return Problem("fused-split", message, min(members), "give all of them one scheme, or none")
