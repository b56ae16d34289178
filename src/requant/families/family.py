"""Facts about one model family, from its YAML file: what an engine fuses into one layer, how experts are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from requant.errors import CallError, Problem
from requant.yaml_text import compose, malformed

Members = tuple[str, ...]

Bank = Literal["halves", "interleaved"]
"""How gate and up lie in a tensor that holds both: one after the other, or in turn, row by row."""

# Checked by hand: every conversion reads these files, and importing pydantic would cost it 80 ms.
_KEYS = ("model_types", "fused", "dense_bank", "expert_dtype")


@dataclass(frozen=True, slots=True)
class Family:
    """``fused`` lists the leaf names that are one layer in engines where they have the same parent.

    Of a group, any members may be missing. The first group that finds two of its members at a parent has them.
    ``dense_bank`` is set where engines want unquantized experts as banks ``[experts, in, out]``, all of a layer in
    one tensor; where gate and up are interleaved there, no engine takes the experts apart. ``expert_dtype``: whether
    engines read a setting of that name in config.json, fp4 or fp8, and guess where it is missing.
    """

    name: str
    model_types: tuple[str, ...]
    fused: tuple[Members, ...]
    dense_bank: Bank | None = None
    expert_dtype: bool = False


@cache
def families() -> Mapping[str, Family]:
    """Return the families that this version knows, by name."""
    sources = [entry for entry in files(__package__).iterdir() if entry.name.endswith(".yaml")]
    found = (parse_family(entry.name, entry.read_text()) for entry in sources)
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


def family_of(model_types: Iterable[str]) -> Family | None:
    """Return the family of a model: that of the first of its ``model_type`` values that one names."""
    by_type = {name: family for family in families().values() for name in family.model_types}
    return next((by_type[name] for name in model_types if name in by_type), None)


def family_for(model_types: Iterable[str], given: Family | None) -> Family | None:
    """Return the facts on a model: those ``given``; its own family's on how experts are stored if they are silent."""
    own = family_of(model_types)
    if given is None or own is None:
        return given or own
    return replace(given, dense_bank=given.dense_bank or own.dense_bank, expert_dtype=own.expert_dtype)


def family_named(name: str) -> Family:
    """Return a family by its name, or from a YAML file by its path; CallError where it is neither."""
    known = families().get(name)
    if known is not None:
        return known
    path = Path(name)
    try:
        found = path.is_file()
    except (OSError, ValueError):  # too long a name, a NUL in it
        found = False
    if not found:
        remedy = f"one of {', '.join(families())}, or a file that `requant family init` has drafted"
        raise CallError(Problem("bad-option", f"unknown family {name!r}", remedy=remedy))
    try:
        return parse_family(name, path.read_text())
    except (OSError, UnicodeError) as error:
        raise _malformed(name, 0, str(error)) from None


def parse_family(file: str, text: str) -> Family:
    """Parse the text of a family's YAML ``file``; CallError, with file and line, where it is not one."""
    top = compose("family", file, text)
    found: dict[str, Any] = {}
    for key, value in top.value:
        if key.value not in _KEYS:
            raise _malformed(file, key.start_mark.line + 1, f"its keys are {', '.join(_KEYS)}, not {key.value!r}")
        found[key.value] = value
    types = _names(file, found["model_types"]) if "model_types" in found else ()
    fused = tuple(_group(file, node) for node in _items(file, found["fused"])) if "fused" in found else ()
    bank = _bank(file, found["dense_bank"]) if "dense_bank" in found else None
    return Family(Path(file).stem, types, fused, bank, _flag(file, found.get("expert_dtype")))


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


def _group(file: str, node: Any) -> Members:
    members = _names(file, node)
    if len(set(members)) < max(2, len(members)):
        raise _malformed(file, node.start_mark.line + 1, "a fused group has two or more names, each once")
    return members


def _bank(file: str, node: Any) -> Bank:
    for bank in get_args(Bank):
        if node.value == bank:
            return bank  # type: ignore[no-any-return]
    raise _malformed(file, node.start_mark.line + 1, f"dense_bank is one of {', '.join(get_args(Bank))}")


def _flag(file: str, node: Any) -> bool:
    if node is None or node.tag != "tag:yaml.org,2002:bool":
        if node is not None:
            raise _malformed(file, node.start_mark.line + 1, "expert_dtype is true or false")
        return False
    return bool(node.value.lower() in ("true", "yes", "on"))


def _names(file: str, node: Any) -> Members:
    """Return the strings of a YAML list."""
    found = []
    for item in _items(file, node):
        if item.tag != "tag:yaml.org,2002:str":
            raise _malformed(file, item.start_mark.line + 1, "a name is expected here")
        found.append(item.value)
    return tuple(found)


def _items(file: str, node: Any) -> list[Any]:
    if node.tag != "tag:yaml.org,2002:seq":
        raise _malformed(file, node.start_mark.line + 1, "model_types is a list of names, fused a list of such lists")
    return list(node.value)


def _malformed(file: str, line: int, what: str) -> CallError:
    return malformed("family", file, line, what)
