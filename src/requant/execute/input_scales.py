"""The activation scales that a scheme stores beside its weights, found without running the model.

Members of a fused layer share one value, and so do all experts of a layer: engines keep one. Only a scale that lies
beside a weight already stays what it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from requant.checkpoint.checkpoint import Checkpoint, open_checkpoint
from requant.checkpoint.header import TensorRef
from requant.checkpoint.strict_json import load_object
from requant.dialects import DIALECTS
from requant.dialects.compressed_tensors import COMPRESSED_TENSORS
from requant.dialects.recognise import Weight
from requant.engines.names import name_variants
from requant.errors import CallError, CheckpointError, Problem
from requant.families.family import fused_groups
from requant.formats.dense import VALUE_DTYPES
from requant.plan.input_bound import InputBounds, Latent
from requant.plan.inventory import take_inventory
from requant.plan.lots import StoredInput
from requant.plan.plan import Plan
from requant.plan.source_config import config_if_any

InputAmax = Callable[[StoredInput], float]

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.*)")
_MOST_NAMED = 20
_LEAST, _LARGEST = 1e-30, 1e30
_BOUND_BYTES = 16 << 20
"""A projection is read in pieces that take so many bytes as float64."""


def input_amax(plan: Plan) -> InputAmax:
    """Return the function from an activation scale to be written to the activations' amax behind it.

    A weight that has an activation scale of its own keeps it, unless the recipe names another source. Raises
    CheckpointError for the weights that a source says nothing of (``missing-part``) or whose own scale is no positive
    number (``nan-or-inf``), and CallError for a source that cannot be read.
    """
    wish = plan.recipe.input_scale
    stored = [one for shard in plan.shards for one in shard.inputs]
    own: dict[str, float] = {}
    if plan.bounds is not None:
        known = _from_bounds(plan.checkpoint, plan.bounds, stored)
    elif wish.path is not None and stored:
        known = _from_path(wish.path)
        missing = [one.weight for one in stored if _look_up(known, one.weight.module) is None]
        if missing:
            raise CheckpointError(_missing(missing, str(wish.path)), plan.to_json())
    else:
        own = known = {one.weight.module: _own(plan.checkpoint, one.weight) for one in stored if one.weight.inputs}
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
        module = one.weight.module
        found = own[module] if module in own else shared.get(keys[module])
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
    if part.dtype not in VALUE_DTYPES:
        message = f"{part.name} in {part.shard} is {part.dtype}: no scale of activations"
        raise CheckpointError(Problem("unknown-format", message, weight.module, "restore it from its source"))
    stored = _values(checkpoint, part)
    if not (stored.size and all(value > 0 and _is_amax(scale.amax(value)) for value in stored.tolist())):
        message = f"{part.name} in {part.shard} is {stored.tolist()}: no scale of activations"
        raise CheckpointError(Problem("nan-or-inf", message, weight.module, "calibrate it, or give --input-scale"))
    return max(scale.amax(value) for value in stored.tolist())


def _values(checkpoint: Checkpoint, tensor: TensorRef, rows: slice = slice(None)) -> NDArray[np.float32]:
    """Return a tensor of floats, or some rows of it, as F32."""
    first, last, _ = rows.indices(tensor.shape[0] if tensor.shape else 1)
    share = tensor.nbytes // (tensor.shape[0] if tensor.shape else 1)
    data = checkpoint.store.read(tensor.shard, tensor.offset + first * share, (last - first) * share)
    return np.frombuffer(data, VALUE_DTYPES[tensor.dtype]).astype(np.float32).reshape(last - first, *tensor.shape[1:])


def _from_bounds(checkpoint: Checkpoint, bounds: InputBounds, stored: list[StoredInput]) -> dict[str, float]:
    """Return the bound on the activations of every module; see `requant.plan.input_bound`."""
    by_layer: dict[Latent, float] = {}
    found = {}
    for module in (one.weight.module for one in stored):
        latent = bounds.latents.get(module)
        if latent is None:
            found[module] = bounds.situ
            continue
        if latent not in by_layer:
            by_layer[latent] = _bound(checkpoint, latent)
        found[module] = by_layer[latent]
    return found


def _bound(checkpoint: Checkpoint, latent: Latent) -> float:
    """Return √n · max ‖D_i ∘ g‖₂, the largest magnitude that D·y can have for a y of the norm with gain g."""
    gain = _values(checkpoint, latent.norm).astype(np.float64)
    largest = 0.0
    rows, columns = latent.down.shape
    step = max(1, _BOUND_BYTES // (8 * columns))
    for first in range(0, rows, step):
        scaled = _values(checkpoint, latent.down, slice(first, first + step)) * gain
        largest = float(np.maximum(largest, np.einsum("ij,ij->i", scaled, scaled).max()))  # unlike max, keeps a NaN
    if not (largest > 0 and math.isfinite(largest)):
        message = f"it and {latent.norm.name} bound the experts' input by {largest}: no scale of activations"
        remedy = "repair the source, or give --input-scale constant:1.0"
        raise CheckpointError(Problem("nan-or-inf", message, latent.down.name, remedy))
    return math.sqrt(columns * largest)


def _from_path(path: Path) -> dict[str, float]:
    """Return amax by module: out of a JSON file, or of the activation scales of a checkpoint."""
    if path.is_dir():
        with open_checkpoint(path) as checkpoint:
            weights = take_inventory(checkpoint, config_if_any(checkpoint)).weights
            found = {weight.module: _own(checkpoint, weight) for weight in weights if weight.inputs}
        if not found:
            raise CallError(Problem("bad-option", f"input-scale: {path} has no activation scales"))
        return found
    try:
        table = load_object(path.read_bytes(), allow_constants=True)
    except (OSError, ValueError) as error:
        raise CallError(Problem("bad-option", f"input-scale: {path} is no JSON of amax by module: {error}")) from None
    wrong = [f"{module}: {str(amax)[:40]}" for module, amax in table.items() if not _is_amax(amax)]
    if wrong:
        raise CallError(Problem("bad-option", f"input-scale: in {path} no amax are {', '.join(wrong[:_MOST_NAMED])}"))
    return {module: float(amax) for module, amax in table.items()}


def _is_amax(value: object) -> bool:
    """Tell whether a number is one from which, and from whose reciprocal, a float32 scale can be made."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _LEAST <= value <= _LARGEST


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
    modules = [one.weight.module for one in stored]
    groups = {} if plan.family is None else fused_groups(modules, plan.family)
    return {module: _EXPERT.sub(r"\1.*.\2", groups.get(module, module)) for module in modules}
