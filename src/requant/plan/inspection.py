"""What a checkpoint holds, told from its headers and its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from requant.checkpoint.checkpoint import Checkpoint
from requant.errors import CheckpointError
from requant.families.roles import Templates, role_of
from requant.plan.disagreements import disagreements
from requant.plan.inventory import take_inventory
from requant.plan.source_config import NO_CONFIG, parse_config


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a checkpoint something makes up: weights (or tensors that are no weight) and bytes."""

    weights: int = 0
    bytes: int = 0

    def plus(self, nbytes: int) -> Share:
        """Return this share with one more weight."""
        return Share(self.weights + 1, self.bytes + nbytes)


@dataclass(frozen=True, slots=True)
class Inspection:
    """Tensors, bytes, and their division by format and by role; ``classes`` maps (role, format) to its share.

    A dense format is named by its dtype. ``family`` is the model_type, ``config`` the quantization_config that
    engines would read.
    """

    tensors: int
    bytes: int
    formats: Mapping[str, Share]
    classes: Mapping[tuple[str, str], Share]
    family: str | None
    config: Mapping[str, Any] | None
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        classes: dict[str, dict[str, Any]] = {}
        for (role, name), share in self.classes.items():
            entry = classes.setdefault(role, {"weights": 0, "bytes": 0, "formats": {}})
            entry["weights"] += share.weights
            entry["bytes"] += share.bytes
            entry["formats"][name] = share.weights
        return {
            "tensors": self.tensors,
            "bytes": self.bytes,
            "formats": {name: {"weights": s.weights, "bytes": s.bytes} for name, s in self.formats.items()},
            "classes": classes,
            "family": self.family,
            "config": self.config,
            "notes": self.notes,
        }


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Divide a checkpoint's tensors by format and role; a broken weight is a note."""
    notes = list(checkpoint.notes)
    source = NO_CONFIG
    try:
        source = parse_config(checkpoint.config, checkpoint.config_file)
    except CheckpointError as error:
        notes += [str(problem) for problem in error.problems]
    inventory = take_inventory(checkpoint, source)
    formats: dict[str, Share] = {}
    classes: dict[tuple[str, str], Share] = {}

    def count(role: str, name: str, nbytes: int) -> None:
        formats[name] = formats.get(name, Share()).plus(nbytes)
        classes[role, name] = classes.get((role, name), Share()).plus(nbytes)

    templates = Templates()
    for weight in inventory.weights:
        name = weight.dtype if weight.format == "dense" else weight.format or "unknown"
        role = role_of(templates.of(weight.module), weight.shape, source.experts).name
        count(role, name, sum(part.nbytes for part in weight.parts))
    for tensor in inventory.others:
        role = role_of(templates.of(tensor.name), tensor.shape, source.experts).name
        count(role, tensor.dtype, tensor.nbytes)
    notes += [str(problem) for problem in inventory.problems]
    notes += disagreements(source, inventory.weights)
    return Inspection(
        checkpoint.tensor_count,
        checkpoint.data_bytes,
        formats,
        classes,
        source.model_type,
        source.quantization or None,
        notes,
    )
