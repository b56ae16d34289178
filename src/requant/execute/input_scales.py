"""The activation scales that a scheme stores beside its weights, found without running the model.

Members of a fused layer share one value, and so do all experts of a layer: engines keep one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from requant.checkpoint.checkpoint import Checkpoint, open_checkpoint
from requant.dialects import DIALECTS
from requant.dialects.compressed_tensors import COMPRESSED_TENSORS
from requant.dialects.recognise import Weight
from requant.engines.resolver import name_variants
from requant.errors import CallError, CheckpointError, Problem
from requant.families.family import family_of, fused_groups
from requant.plan.inventory import take_inventory
from requant.plan.plan import Plan
from requant.plan.shards import StoredInput
from requant.plan.source_config import parse_config

InputAmax = Callable[[StoredInput], float]

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.*)")
_MOST_NAMED = 20


def input_amax(plan: Plan) -> InputAmax:
    """Return the function from an activation scale to be written to the activations' amax behind it.

    A weight that has an activation scale of its own keeps it, unless the recipe names another source. Raises
    CheckpointError (``missing-part``) for the weights that a source says nothing of, and CallError for one that
    cannot be read.
    """
    wish = plan.recipe.input_scale
    stored = [one for shard in plan.shards for one in shard.inputs]
    if wish.kind == "constant":
        known = {one.weight.module: _own(plan.checkpoint, one.weight) for one in stored if one.weight.inputs}
    else:
        known = _from_path(wish.path) if wish.path is not None else {}
        missing = [one.weight for one in stored if _look_up(known, one.weight.module) is None]
        if missing:
            raise CheckpointError(_missing(missing, str(wish.path)))
    if not known:
        return lambda one: _constant(one, wish.value)
    keys = _keys(plan, stored)
    shared: dict[str, float] = {}
    for one in stored:
        found = _look_up(known, one.weight.module)
        if found is not None:
            key = keys[one.weight.module]
            shared[key] = max(shared.get(key, 0.0), found)

    def amax(one: StoredInput) -> float:
        found = shared.get(keys[one.weight.module])
        return _constant(one, wish.value) if found is None else found

    return amax


def _constant(one: StoredInput, value: float) -> float:
    """Return the amax for which compressed-tensors would store ``value``."""
    scale = next(s for s in COMPRESSED_TENSORS.input_scales.values() if s.reach == one.scale.reach)
    return scale.amax(value)


def _own(checkpoint: Checkpoint, weight: Weight) -> float:
    """Return the amax behind the activation scale that a weight has in its checkpoint."""
    scale = DIALECTS[weight.dialect].input_scales[weight.format]
    part = weight.inputs[0]
    data = checkpoint.store.read(part.shard, part.offset, part.nbytes)
    dtype = {"F32": "<f4", "F16": "<f2"}.get(part.dtype)
    if dtype is None:  # BF16 is the upper half of an F32
        value = float((np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).max())
    else:
        value = float(np.frombuffer(data, dtype).max())
    if not (value > 0 and math.isfinite(value)):
        message = f"{part.name} in {part.shard} is {value}: no scale of activations"
        raise CheckpointError(Problem("nan-or-inf", message, weight.module, "calibrate it, or give --input-scale"))
    return scale.amax(value)


def _from_path(path: Path) -> dict[str, float]:
    """Return amax by module: out of a JSON file, or of the activation scales of a checkpoint."""
    if path.is_dir():
        with open_checkpoint(path) as checkpoint:
            weights = take_inventory(checkpoint).weights
            found = {weight.module: _own(checkpoint, weight) for weight in weights if weight.inputs}
        if not found:
            raise CallError(Problem("bad-option", f"input-scale: {path} has no activation scales"))
        return found
    try:
        value = json.loads(path.read_bytes())
        found = {str(module): float(amax) for module, amax in value.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CallError(Problem("bad-option", f"input-scale: {path} is no JSON of amax by module: {error}")) from None
    wrong = [f"{module}: {amax}" for module, amax in found.items() if not (amax > 0 and math.isfinite(amax))]
    if wrong:
        raise CallError(Problem("bad-option", f"input-scale: in {path} no amax are {', '.join(wrong[:_MOST_NAMED])}"))
    return found


def _look_up(known: Mapping[str, float], module: str) -> float | None:
    """Return the amax of a module, under whatever name it goes there."""
    if module in known:
        return known[module]
    return next((known[name] for name in name_variants(module) if name in known), None)


def _missing(weights: list[Weight], where: str) -> list[Problem]:
    remedy = "add them, or give --input-scale constant:1.0"
    more = f" (and {len(weights) - _MOST_NAMED} more)" if len(weights) > _MOST_NAMED else ""
    return [
        Problem("missing-part", f"{where} has no activation scale for it{more}", weight.module, remedy)
        for weight in weights[:_MOST_NAMED]
    ]


def _keys(plan: Plan, stored: list[StoredInput]) -> dict[str, str]:
    """Return module → what it shares its value under."""
    family = plan.recipe.family or family_of(parse_config(plan.checkpoint.config).model_types)
    modules = [one.weight.module for one in stored]
    groups = {} if family is None else fused_groups(modules, family)
    return {module: _EXPERT.sub(r"\1.*.\2", groups.get(module, module)) for module in modules}
