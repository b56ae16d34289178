"""A draft of a family's YAML, from the names in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from requant.checkpoint.checkpoint import Checkpoint
from requant.dialects.recognise import Weight
from requant.families.family import Members, families, family_of
from requant.families.roles import Templates, role_of
from requant.plan.inventory import take_inventory
from requant.plan.source_config import parse_config

_HEAD = """\
# What engines fuse into one layer, drafted from the names of a checkpoint; for `requant convert --family FILE`.
# Members of a fused layer have one scheme and share NVFP4's global scale. To be checked against the engine: vLLM
# lists them in the model's packed_modules_mapping and in what its load_weights stacks.
"""
_MAYBE = """\
# Other leaves of one parent with equally many columns, which an engine might fuse as well:
"""


@dataclass(frozen=True, slots=True)
class FamilyDraft:
    """What a family's YAML could say.

    ``fused`` maps the groups of leaf names that are known to be fused where they meet to the templates of their
    parents; ``candidates`` likewise the leaves that have the same input and are not all in one such group.
    """

    model_types: Members
    fused: dict[Members, list[str]]
    candidates: dict[Members, list[str]]

    def to_yaml(self) -> str:
        """Return the draft as the text of a file, the candidates in comments."""
        import yaml

        def flow(names: Members) -> str:
            return str(yaml.safe_dump(list(names), default_flow_style=True, width=10**6)).strip()

        def items(groups: dict[Members, list[str]], before: str) -> str:
            return "".join(f"{before}  - {flow(names)}  # {_printable(parents)}\n" for names, parents in groups.items())

        fused = f"fused:\n{items(self.fused, '')}" if self.fused else "fused: []\n"
        maybe = f"{_MAYBE}{items(self.candidates, '#')}" if self.candidates else ""
        return f"{_HEAD}model_types: {flow(self.model_types)}\n{fused}{maybe}"

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form."""

        def entries(groups: dict[Members, list[str]]) -> list[dict[str, Any]]:
            return [{"members": list(names), "parents": parents} for names, parents in groups.items()]

        return {
            "ok": True,
            "model_types": list(self.model_types),
            "fused": entries(self.fused),
            "candidates": entries(self.candidates),
            "yaml": self.to_yaml(),
            "problems": [],
            "notes": [],
        }


def draft_family(checkpoint: Checkpoint) -> FamilyDraft:
    """Draft the family of a checkpoint, from its headers and config.json.

    The groups are those of its family, if it is known, or else of the family ``generic``.
    """
    source = parse_config(checkpoint.config, checkpoint.config_file)
    known = family_of(source.model_types) or families()["generic"]
    fused: dict[Members, list[str]] = {}
    candidates: dict[Members, list[str]] = {}
    for parent, leaves in _layers(take_inventory(checkpoint, source, known).weights, source.experts):
        columns = dict(leaves)
        left = set(columns)
        for members in known.fused:
            if len(left.intersection(members)) > 1:
                left.difference_update(members)
                _add(fused, members, parent)
        for width in dict.fromkeys(columns.values()):
            alike = tuple(leaf for leaf in columns if columns[leaf] == width)
            if len(alike) > 1 and not left.isdisjoint(alike):
                _add(candidates, alike, parent)
    types = source.model_types[:1]
    # Of two groups that share a member, the first to find two of its own has it.
    in_order = {members: fused[members] for members in known.fused if members in fused}
    return FamilyDraft(tuple(types), in_order, candidates)


def _layers(weights: Iterable[Weight], experts: int | None) -> Iterable[tuple[str, tuple[tuple[str, int], ...]]]:
    """Return the templates of the modules that hold Linears, each with the leaves found below one and their columns.

    A template under which layers of several kinds stand is there once for each.
    """
    templates = Templates()
    below: dict[str, list[tuple[str, int]]] = {}
    for weight in weights:
        if len(weight.shape) == 2 and not role_of(templates.of(weight.module), weight.shape, experts).keep:
            parent, _, leaf = weight.module.rpartition(".")
            below.setdefault(parent, []).append((leaf, weight.shape[1]))
    return dict.fromkeys((templates.of(parent), tuple(leaves)) for parent, leaves in below.items())


def _add(groups: dict[Members, list[str]], members: Members, parent: str) -> None:
    parents = groups.setdefault(members, [])
    if parent not in parents:
        parents.append(parent)


def _printable(names: Iterable[str]) -> str:
    return "".join(char if char.isprintable() else "?" for char in ", ".join(names))
