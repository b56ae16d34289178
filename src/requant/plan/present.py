"""The quantization_config that the tensors of a checkpoint call for, whatever its config.json says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from requant.checkpoint.checkpoint import Checkpoint
from requant.dialects import OUTPUT_DIALECTS, Dialect
from requant.dialects.recognise import Weight
from requant.errors import CheckpointError, Problem
from requant.families.family import family_of
from requant.plan.config_edit import edit_config
from requant.plan.describe import describe
from requant.plan.disagreements import disagreements
from requant.plan.inventory import take_inventory
from requant.plan.select import Selection
from requant.plan.source_config import parse_config


@dataclass(frozen=True, slots=True)
class Present:
    """What a checkpoint's config should say: the value (None: nothing is quantized), and the files that hold it.

    ``files`` are those that are not what they should be, by name. ``notes`` are the ways in which they are not.
    """

    quantization_config: dict[str, Any] | None
    files: dict[str, bytes]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        return {
            "ok": True,
            "quantization_config": self.quantization_config,
            "differs": sorted(self.files),
            "problems": [],
            "notes": self.notes,
        }


def config_of(checkpoint: Checkpoint) -> Present:
    """Describe the weights of a checkpoint as they lie there.

    Where the tensors leave open what becomes of activations, the config that is there decides, or else nothing does.
    Raises CheckpointError for weights that are not whole, of formats unknown here, or in dialects that have no config
    of ours.
    """
    source = parse_config(checkpoint.config, checkpoint.config_file)
    family = family_of(source.model_types)
    inventory = take_inventory(checkpoint, source, family)
    if inventory.problems:
        raise CheckpointError(inventory.problems)
    dialect = _dialect_of(inventory.weights)
    new = describe(Selection(kept=inventory.weights), dialect, source, family, native_activations=False)
    files = {source.file: edit_config(source.raw, new.quantization_config, new.settings, source.key), **new.files}
    here = checkpoint.store.files()
    changed = {
        name: data
        for name, data in files.items()
        if name not in here or checkpoint.store.read(name, 0, here[name]) != data
    }
    return Present(new.quantization_config, changed, [*checkpoint.notes, *disagreements(source, inventory.weights)])


def _dialect_of(weights: list[Weight]) -> Dialect:
    """Return the dialect that the quantized weights are in; compressed-tensors where none is."""
    found = Counter(weight.dialect for weight in weights if weight.format not in ("", "dense"))
    if not found:
        return OUTPUT_DIALECTS["compressed-tensors"]
    (name, _), *others = found.most_common()
    if others or name not in OUTPUT_DIALECTS:
        what = ", ".join(f"{count} of {dialect}" for dialect, count in found.most_common())
        message = f"its quantized weights have names of {what}: no one config of ours describes them"
        raise CheckpointError(Problem("unknown-format", message, remedy="convert it, which makes them one dialect's"))
    return OUTPUT_DIALECTS[name]
