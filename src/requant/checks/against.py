"""Is a checkpoint what a conversion of another may have made of it: every tensor, and every value, accounted for.

A weight that stays in its format has the same bits, or, where only its scales are spelled another way, the same
values. One that changed it lies within the bound of its new format (`requant.formats.grid`). Every other tensor is
there byte for byte, and nothing else is. Scales of activations beside weights are what the conversion was told.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from requant.checkpoint.checkpoint import Checkpoint
from requant.checkpoint.store import LocalStore
from requant.checks.pairs import Pair, flat, pair_up, same_bytes, tiles_of, values
from requant.dialects.recognise import Weight
from requant.errors import Problem
from requant.execute.progress import Progress
from requant.execute.scratch import Scratch
from requant.execute.tiles import Rows
from requant.execute.workers import run_parallel
from requant.formats import Tile, format_named
from requant.formats.grid import lost_before
from requant.plan.source_config import config_if_any

_AGAIN = "convert it again from its source"
_WIDEST = 32.0
"""A pooled scale reaches 21 times as far as the values in the widest exact route, from MXFP4 to NVFP4."""
_TINY = 2.0**-100
"""Below, there may be no scale as small as it should be."""


@dataclass(slots=True)
class _Tally:
    """How many values are not what they should be, and the worst: its place, what it was, is, and may be away."""

    count: int = 0
    excess: float = 0.0
    worst: str = ""

    def add(self, count: int, rows: Rows, before: Tile, after: Tile, place: int, allowed: float) -> None:
        """Add what was found in some rows, the worst at flat index ``place`` of them."""
        self.count += count
        columns = before.bits.shape[1]
        was, is_ = (float(tile.bits.view(np.float32).flat[place]) for tile in (before, after))
        distance = abs(was - is_)
        excess = distance / allowed if allowed and math.isfinite(distance) else math.inf
        if excess > self.excess or not self.worst:
            self.excess = excess
            limit = f" (at most {allowed:.3g} apart)" if allowed else ""
            self.worst = (
                f"[{rows.first + place // columns}, {place % columns}]: {was:.9g} in the source, {is_:.9g} here{limit}"
            )

    def told(self, pair: Pair, what: str) -> str:
        """Say what was found; "" if nothing."""
        if not self.count:
            return ""
        total = math.prod(pair.b.shape)
        return f"{_described(pair.b)}: {self.count:,} of {total:,} values are {what}; the worst at {self.worst}"


class _Pooled(NamedTuple):
    """A weight with a scale that it may share: how far that reaches, and the largest magnitude before."""

    weight: Weight
    reach: float
    amax: float


@dataclass(slots=True)
class _Findings:
    problems: list[Problem] = field(default_factory=list)
    pooled: list[_Pooled] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def check_against(converted: Checkpoint, source: Checkpoint, workers: int, progress: Progress) -> list[Problem]:
    """Return a problem for everything in ``converted`` that no conversion makes of ``source``.

    CheckpointError for weights of either that are not whole.
    """
    pairs = pair_up(source, converted)
    dtype = config_if_any(source).dtype
    found = _Findings()
    found.problems += [_counterpart(before, after) for before, after in pairs.apart]

    def look_at(pair: Pair, scratch: Scratch) -> None:
        if pair.a.format == pair.b.format:
            what = _changed(source.store, converted.store, pair, scratch)
        elif pair.a.format and pair.b.format:
            what = _beyond(source.store, converted.store, pair, dtype, scratch, found)
        else:
            what = f"the source has {_described(pair.a)}, here is {_described(pair.b)}: it cannot be compared"
        if what:
            with found.lock:
                found.problems.append(_problem(pair.b, what))
        advance(sum(part.nbytes for part in pair.a.parts))

    with progress("comparing with the source", source.data_bytes) as advance:
        run_parallel(pairs.together, look_at, workers)
    found.problems += _too_wide(found.pooled)
    return sorted(found.problems, key=lambda problem: problem.module)


def _counterpart(before: Weight | None, after: Weight | None) -> Problem:
    if before is None and after is not None:
        message = f"{_described(after)} is not in the source"
        return Problem("orphan-part", message, after.module, "delete it, or convert again")
    assert before is not None
    if after is None:
        return Problem("missing-part", f"{_described(before)} of the source is not there", before.module, _AGAIN)
    return _problem(after, f"the source has {_described(before)}, here is {_described(after)}")


def _problem(weight: Weight, what: str) -> Problem:
    return Problem("differs", what, weight.module, _AGAIN)


def _described(weight: Weight) -> str:
    shards = ", ".join(dict.fromkeys(part.shard for part in weight.parts))
    form = weight.format if weight.format not in ("", "dense") else weight.parts[0].dtype
    return f"{form} {list(weight.shape)} in {shards}"


def _changed(store_a: LocalStore, store_b: LocalStore, pair: Pair, scratch: Scratch) -> str:
    """Say in what a weight that stays in its format is not what it was; "" where it is."""
    a, b = pair
    kept = f"the source has {_described(a)}, here is {_described(b)}"
    if a.format in ("", "dense") and [part.dtype for part in a.parts] != [part.dtype for part in b.parts]:
        return kept
    turned = any(weight.bank is not None and weight.bank.stride for weight in pair)
    if not turned and len(a.parts) == len(b.parts):
        if all(same_bytes(store_a, x, store_b, y) for x, y in zip(a.parts, b.parts, strict=True)):
            return ""
        if not a.format:
            return f"{kept}, of other bytes"
    pair, tally, alike = Pair(flat(a), flat(b)), _Tally(), True
    for rows in tiles_of(pair):
        (before, codes), (after, others) = (
            values(store, weight, rows, scratch, slot)
            for store, weight, slot in ((store_a, pair.a, "a"), (store_b, pair.b, "b"))
        )
        alike = alike and np.array_equal(codes[0].bits, others[0].bits)
        x, y = before.bits.view(np.float32), after.bits.view(np.float32)
        differing = np.flatnonzero((x != y) & ~(np.isnan(x) & np.isnan(y)))
        if differing.size:
            with np.errstate(invalid="ignore"):
                distances = np.nan_to_num(np.abs(x - y).flat[differing], nan=np.inf)
            tally.add(differing.size, rows, before, after, int(differing[distances.argmax()]), 0.0)
    if not tally.count and a.format == "dense" and not alike:
        return f"{kept}, of the same values but other bytes"
    return tally.told(pair, "not what they were, although the format is the same")


def _beyond(
    store_a: LocalStore, store_b: LocalStore, pair: Pair, dtype: str, scratch: Scratch, found: _Findings
) -> str:
    """Say which values of a weight that changed its format are too far from what they were; "" if none is.

    ``dtype`` is the one in which the source's config says that the model computes: quantized weights are decoded to it.
    """
    from requant.kernels import bounds

    if len(pair.a.shape) != 2:
        return f"the source has {_described(pair.a)}, here is {_described(pair.b)}: it cannot be compared"
    through = pair.a.dtype if pair.a.format == "dense" else dtype
    # A decoder rounds to the dtype of the scales, then to the one that was asked for.
    on_the_way = () if pair.a.format == "dense" else (pair.a.dtype, through)
    tally, amax, reach, whole = _Tally(), 0.0, 0.0, None
    for rows in tiles_of(pair):
        before, _ = values(store_a, pair.a, rows, scratch, "a")
        after, parts = values(store_b, pair.b, rows, scratch, "b")
        grid = lost_before(format_named(pair.b.format).grid(parts, through), on_the_way)
        x, y = before.bits.view(np.float32), after.bits.view(np.float32)
        if grid.region[0] == 0 and whole is None:
            whole = _amax(store_a, pair, scratch)
        if grid.pooled:
            amax, reach = max(amax, _largest(x)), grid.pooled
        far = bounds.beyond(x, y, *grid[:4], whole or 0.0, grid.allowance)
        if far.values:
            tally.add(far.values, rows, before, after, far.worst, far.allowed)
    if reach and not pair.a.format.startswith("nvfp4"):
        with found.lock:
            found.pooled.append(_Pooled(pair.b, reach, amax))
    return tally.told(pair, f"not within the bound of {pair.b.format}")


def _amax(store: LocalStore, pair: Pair, scratch: Scratch) -> float:
    return max(
        (_largest(values(store, pair.a, rows, scratch, "amax")[0].bits.view(np.float32)) for rows in tiles_of(pair)),
        default=0.0,
    )


def _largest(x: NDArray[np.float32]) -> float:
    from requant.kernels import floats

    return floats.amax(x.view(np.uint32), "F32")[0]


def _too_wide(pooled: Iterable[_Pooled]) -> Iterator[Problem]:
    """Yield a problem for weights with a shared scale that reaches far beyond the values of all that share it.

    Their small values are then below the smallest scale of a block, and lost: compressed-tensors' own G of 1, say.
    """
    together: dict[float, list[_Pooled]] = {}
    for one in pooled:
        together.setdefault(one.reach, []).append(one)
    for reach, sharing in together.items():
        amax = max(one.amax for one in sharing)
        if _TINY < _WIDEST * amax < reach:
            for one in sharing:
                what = f"its global scale is for values up to {reach:.3g}, and the source's reach {amax:.3g}"
                yield _problem(one.weight, f"{_described(one.weight)}: {what}")
