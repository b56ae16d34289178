"""Facts about one model family, from its YAML file: which modules an engine fuses into one layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path

from requant.errors import CallError, Problem

Members = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """``fused`` lists the leaf names that are one layer in engines where they have the same parent.

    Of a group, any members may be missing. The first group that finds two of its members at a parent has them.
    """

    name: str
    model_types: tuple[str, ...]
    fused: tuple[Members, ...]


@cache
def families() -> Mapping[str, Family]:
    """Return the families that this version knows, by name."""
    sources = [entry for entry in files(__package__).iterdir() if entry.name.endswith(".yaml")]
    found = (parse_family(Path(entry.name).stem, entry.read_text()) for entry in sources)
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


def family_of(model_types: Iterable[str]) -> Family | None:
    """Return the family of a model: that of the first of its ``model_type`` values that one names."""
    by_type = {name: family for family in families().values() for name in family.model_types}
    return next((by_type[name] for name in model_types if name in by_type), None)


def family_named(name: str) -> Family:
    """Return a family by its name, or from a YAML file by its path; CallError where it is neither."""
    known = families().get(name)
    if known is not None:
        return known
    path = Path(name)
    if not path.is_file():
        remedy = f"one of {', '.join(families())}, or a file that `requant family init` has drafted"
        raise CallError(Problem("bad-option", f"unknown family {name!r}", remedy=remedy))
    return parse_family(path.stem, path.read_text())


def parse_family(name: str, text: str) -> Family:
    """Parse a family's YAML; CallError, with the line, where it is not one."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _malformed(name, str(error)) from None
    if not isinstance(value, dict) or not value.keys() <= {"model_types", "fused"}:
        raise _malformed(name, "its keys are model_types and fused")
    types, fused = value.get("model_types", []), value.get("fused", [])
    if not (_names(types) and isinstance(fused, list) and all(_names(members) for members in fused)):
        raise _malformed(name, "model_types is a list of names, fused a list of lists of names")
    return Family(name, tuple(types), tuple(tuple(members) for members in fused))


def fused_groups(modules: Iterable[str], family: Family) -> dict[str, str]:
    """Return the key of its fused group for every module that is a member of one with others present."""
    children: dict[str, list[str]] = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        children.setdefault(parent, []).append(leaf)
    groups = {}
    for parent, leaves in children.items():
        for leaf, first in _divide(tuple(leaves), family.fused):
            groups[f"{parent}.{leaf}"] = f"{parent}.{first}"
    return groups


@lru_cache(maxsize=4096)
def _divide(leaves: Members, fused: tuple[Members, ...]) -> tuple[tuple[str, str], ...]:
    """Return (leaf, the first member of its group) for the leaves of one parent that are fused."""
    left = set(leaves)
    found = []
    for members in fused:
        present = [member for member in members if member in left]
        if len(present) > 1:
            left.difference_update(present)
            found += [(member, present[0]) for member in present]
    return tuple(found)


def _names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _malformed(name: str, what: str) -> CallError:
    return CallError(Problem("bad-option", f"family {name}: {what}", remedy="correct the file"))
