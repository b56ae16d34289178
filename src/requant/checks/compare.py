"""How far two checkpoints are apart, in the values that their weights stand for."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from requant.checkpoint.checkpoint import Checkpoint
from requant.checkpoint.store import LocalStore
from requant.dialects.recognise import Weight
from requant.errors import CheckpointError
from requant.execute.progress import Progress
from requant.execute.scratch import Scratch
from requant.execute.tiles import Rows, read_weight, tile_rows
from requant.execute.workers import run_parallel
from requant.families.family import families, family_of
from requant.families.roles import Templates, role_of
from requant.formats import FLOAT_DTYPES, Tile, format_named
from requant.plan.inventory import take_inventory
from requant.plan.source_config import NO_CONFIG, SourceConfig, parse_config

WORST_DB = -999.0
"""The SQNR where there is noise and no signal, or noise without bound (a NaN or Inf on one side only)."""

_PIECE = 8 << 20


@dataclass(slots=True)
class Distance:
    """Differences over some weights."""

    weights: int = 0
    values: int = 0
    differing: int = 0
    signal: float = 0.0
    noise: float = 0.0
    max_rel_error: float = 0.0

    def add(self, other: Distance) -> None:
        """Add another distance to this one."""
        self.weights += other.weights
        self.values += other.values
        self.differing += other.differing
        self.signal += other.signal
        self.noise += other.noise
        self.max_rel_error = max(self.max_rel_error, other.max_rel_error)

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise, 10 log10(sum a^2 / sum (a-b)^2), in dB; None (infinite) without noise."""
        if self.noise == 0:
            return None
        ratio = self.signal / self.noise
        return max(WORST_DB, 10 * math.log10(ratio)) if ratio > 0 else WORST_DB

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form; infinity is null."""
        worst = self.max_rel_error
        return {
            "weights": self.weights,
            "values": self.values,
            "differing": self.differing,
            "sqnr_db": self.sqnr_db,
            "max_rel_error": worst if math.isfinite(worst) else None,
        }


@dataclass(slots=True)
class Comparison:
    """The distance in all and by role; ``notes`` name what only one of the two holds, or holds in another shape."""

    total: Distance = field(default_factory=Distance)
    classes: dict[str, Distance] = field(default_factory=dict)
    unmatched: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether both stand for the same values throughout."""
        return self.total.differing == 0 and self.unmatched == 0

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        classes = {role: distance.to_json() for role, distance in sorted(self.classes.items())}
        return {**self.total.to_json(), "unmatched": self.unmatched, "classes": classes, "notes": self.notes}


class _Pair(NamedTuple):
    role: str
    a: Weight
    b: Weight


def compare_checkpoints(a: Checkpoint, b: Checkpoint, workers: int, progress: Progress) -> Comparison:
    """Decode every weight of both to float32 and compare."""
    result = Comparison()
    lock = threading.Lock()

    def measure(pair: _Pair, scratch: Scratch) -> None:
        distance = _distance(a.store, pair.a, b.store, pair.b, scratch)
        with lock:
            result.total.add(distance)
            result.classes.setdefault(pair.role, Distance()).add(distance)
        advance(sum(part.nbytes for part in pair.a.parts))

    total = a.data_bytes
    with progress("comparing", total) as advance:
        run_parallel(_pairs(a, b, result), measure, workers)
    return result


def _pairs(a: Checkpoint, b: Checkpoint, result: Comparison) -> Iterator[_Pair]:
    """Pair the weights by module; what has no partner goes into the result's notes."""
    experts = _source(a).experts
    left, right = _by_module(a), _by_module(b)
    templates = Templates()
    unmatched = []
    for module, weight in left.items():
        other = right.pop(module, None)
        if other is None:
            unmatched.append(f"{module} is in the first only")
        elif other.shape != weight.shape:
            unmatched.append(f"{module} is {list(weight.shape)} in the first, {list(other.shape)} in the second")
        else:
            yield _Pair(role_of(templates.of(module), weight.shape, experts).name, weight, other)
    unmatched += [f"{module} is in the second only" for module in right]
    result.unmatched = len(unmatched)
    result.notes += unmatched[:20]
    if len(unmatched) > 20:
        result.notes.append(f"… and {len(unmatched) - 20} more without a counterpart")


def _source(checkpoint: Checkpoint) -> SourceConfig:
    return NO_CONFIG if checkpoint.config is None else parse_config(checkpoint.config, checkpoint.config_file)


def _by_module(checkpoint: Checkpoint) -> dict[str, Weight]:
    """Return all weights by module, and every other tensor as a weight of its own."""
    source = _source(checkpoint)
    # Of an unknown family the usual order of gate and up in a bank: were it another, the values would not match.
    family = family_of(source.model_types) or families()["generic"]
    inventory = take_inventory(checkpoint, source, family)
    if inventory.problems:
        raise CheckpointError(inventory.problems)
    weights = {weight.module: weight for weight in inventory.weights}
    for tensor in inventory.others:
        format_name = "dense" if tensor.dtype in FLOAT_DTYPES else ""
        weights[tensor.name] = Weight(tensor.name, format_name, tensor.shape, tensor.dtype, (tensor,))
    return weights


def _distance(store_a: LocalStore, a: Weight, store_b: LocalStore, b: Weight, scratch: Scratch) -> Distance:
    from requant.kernels import compare

    flat_a, flat_b = _flat(a), _flat(b)
    distance = Distance(weights=1, values=flat_a.shape[0] * flat_a.shape[1])
    if not (a.format and b.format):
        _compare_bytes(store_a, flat_a, store_b, flat_b, distance)
        return distance
    turned = b.bank is not None and b.bank.stride
    for rows in tile_rows(flat_b if turned else flat_a, 4):
        first = _values(store_a, flat_a, rows, scratch, "a")
        second = _values(store_b, flat_b, rows, scratch, "b")
        differing, signal, noise, worst = compare.accumulate(first.bits.view(np.float32), second.bits.view(np.float32))
        distance.add(Distance(0, 0, int(differing), float(signal), float(noise), float(worst)))
    return distance


def _flat(weight: Weight) -> Weight:
    """Return a dense or opaque tensor of any rank as if it had two dimensions; a quantized one has."""
    if len(weight.shape) == 2:
        return weight
    columns = weight.shape[-1] if weight.shape else 1
    rows = math.prod(weight.shape[:-1])
    return weight._replace(shape=(rows, columns), parts=(weight.parts[0]._replace(shape=(rows, columns)),))


def _values(store: LocalStore, weight: Weight, rows: Rows, scratch: Scratch, slot: str) -> Tile:
    out = scratch.tile(slot, "F32", rows.last - rows.first, weight.shape[1])
    format_named(weight.format).decode(read_weight(store, weight, rows, scratch), out)
    return out


def _compare_bytes(store_a: LocalStore, a: Weight, store_b: LocalStore, b: Weight, distance: Distance) -> None:
    """Compare what cannot be decoded; all values of a weight whose bytes are not the same count as differing."""
    same = len(a.parts) == len(b.parts) and all(
        (x.name, x.dtype, x.nbytes) == (y.name, y.dtype, y.nbytes)
        and all(
            store_a.read(x.shard, x.offset + at, min(_PIECE, x.nbytes - at))
            == store_b.read(y.shard, y.offset + at, min(_PIECE, x.nbytes - at))
            for at in range(0, x.nbytes, _PIECE)
        )
        for x, y in zip(a.parts, b.parts, strict=True)
    )
    if not same:
        distance.differing = distance.values
        distance.max_rel_error = math.inf
