"""Exact transcodes: pairs of formats between which no value changes, and where that ends.

A microscaled value is e2m1 * 2^k, at most two significant bits; a target that holds it with a power-of-two
scale loses nothing as long as the values under one scale lie close enough together. A region (the values
under one target scale) in which they do not is *over-span*: it is rounded to nearest even with the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Tile


class Pool(NamedTuple):
    """A number that a route must know of a whole weight, or fused group: the largest over all its tiles.

    ``of(source parts)`` is a tile's number, -inf where it has none; ``bound(scales)`` is at least that, told from the
    parts but the payload, so that payloads need not be read where the bound is no more than what is known already.
    """

    bound: Callable[[Sequence[Tile]], float]
    of: Callable[[Sequence[Tile]], float]


@dataclass(frozen=True, slots=True)
class ExactRoute:
    """How one format becomes another without decoding.

    ``transcode(source parts, target parts, pooled)`` returns how many values lie in over-span regions.
    ``suspects(scales, pooled)`` is a boolean array over the regions of a tile, a superset of the over-span ones
    found from the scales alone; ``over_span(source parts, pooled)`` counts the values exactly, without writing.
    ``pooled`` is what ``pool`` found; without one, 0. A weight for which ``holds(pooled)`` is false does not
    qualify, and takes the way of other weights. The target's float scales may be BF16 or F32: powers of two are
    the same in both.
    """

    transcode: Callable[[Sequence[Tile], Sequence[Tile], float], int]
    suspects: Callable[[Sequence[Tile], float], NDArray[np.bool_]]
    over_span: Callable[[Sequence[Tile], float], int]
    pool: Pool | None = None
    holds: Callable[[float], bool] | None = None


def same_format() -> ExactRoute:
    """Return the route of a weight that only lies in another order in its file."""
    return lossless(_copy)


def _copy(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
    for have, wanted in zip(source, target, strict=True):
        wanted.bits[...] = have.bits
    return 0


def none_odd(pooled: float) -> bool:
    """Tell, for a route that pools 1 for what it cannot take and 0 otherwise, whether a weight qualifies."""
    return pooled <= 0


def lossless(
    transcode: Callable[[Sequence[Tile], Sequence[Tile], float], int],
    pool: Pool | None = None,
    holds: Callable[[float], bool] | None = None,
) -> ExactRoute:
    """Return a route that loses nothing of a weight that qualifies."""
    return ExactRoute(transcode, _no_suspects, _nothing, pool, holds)


def _no_suspects(_scales: Sequence[Tile], _pooled: float) -> NDArray[np.bool_]:
    return np.zeros((1, 1), np.bool_)


def _nothing(_source: Sequence[Tile], _pooled: float) -> int:
    return 0
