"""How far two checkpoints are apart, in the values that their weights stand for."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from requant.checkpoint.checkpoint import Checkpoint
from requant.checkpoint.store import LocalStore
from requant.checks.pairs import Pair, Pairs, flat, pair_up, same_bytes, tiles_of, values
from requant.execute.progress import Progress
from requant.execute.scratch import Scratch
from requant.execute.workers import run_parallel
from requant.families.roles import Templates, role_of
from requant.plan.source_config import config_if_any

WORST_DB = -999.0
"""The SQNR where there is noise and no signal, or noise without bound (a NaN or Inf on one side only)."""


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


def compare_checkpoints(a: Checkpoint, b: Checkpoint, workers: int, progress: Progress) -> Comparison:
    """Decode every weight of both to float32 and compare."""
    pairs = pair_up(a, b)
    result = Comparison()
    _note_unmatched(pairs, result)
    lock = threading.Lock()
    experts = config_if_any(a).experts
    templates = Templates()

    def measure(pair: Pair, scratch: Scratch) -> None:
        distance = _distance(a.store, b.store, pair, scratch)
        with lock:
            role = role_of(templates.of(pair.a.module), pair.a.shape, experts).name
            result.total.add(distance)
            result.classes.setdefault(role, Distance()).add(distance)
        advance(sum(part.nbytes for part in pair.a.parts))

    total = a.data_bytes
    with progress("comparing", total) as advance:
        run_parallel(pairs.together, measure, workers)
    return result


def _note_unmatched(pairs: Pairs, result: Comparison) -> None:
    """Let the notes name what has no partner."""
    unmatched = []
    for a, b in pairs.apart:
        if a is not None and b is not None:
            unmatched.append(f"{a.module} is {list(a.shape)} in the first, {list(b.shape)} in the second")
        elif a is not None:
            unmatched.append(f"{a.module} is in the first only")
        elif b is not None:
            unmatched.append(f"{b.module} is in the second only")
    result.unmatched = len(unmatched)
    result.notes += unmatched[:20]
    if len(unmatched) > 20:
        result.notes.append(f"… and {len(unmatched) - 20} more without a counterpart")


def _distance(store_a: LocalStore, store_b: LocalStore, pair: Pair, scratch: Scratch) -> Distance:
    from requant.kernels import compare

    pair = Pair(flat(pair.a), flat(pair.b))
    distance = Distance(weights=1, values=pair.a.shape[0] * pair.a.shape[1])
    if not (pair.a.format and pair.b.format):
        _compare_bytes(store_a, store_b, pair, distance)
        return distance
    for rows in tiles_of(pair):
        first, _ = values(store_a, pair.a, rows, scratch, "a")
        second, _ = values(store_b, pair.b, rows, scratch, "b")
        differing, signal, noise, worst = compare.accumulate(first.bits.view(np.float32), second.bits.view(np.float32))
        distance.add(Distance(0, 0, int(differing), float(signal), float(noise), float(worst)))
    return distance


def _compare_bytes(store_a: LocalStore, store_b: LocalStore, pair: Pair, distance: Distance) -> None:
    """Compare what cannot be decoded; all values of a weight whose bytes are not the same count as differing."""
    a, b = pair.a.parts, pair.b.parts
    same = len(a) == len(b) and all(
        (x.name, x.dtype) == (y.name, y.dtype) and same_bytes(store_a, x, store_b, y) for x, y in zip(a, b, strict=True)
    )
    if not same:
        distance.differing = distance.values
        distance.max_rel_error = math.inf
