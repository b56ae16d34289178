"""Whether quantized values lie as close to what they were made of as their grid of codes allows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .native import Kernel

_beyond = Kernel("bounds", "beyond")


class Allowance(NamedTuple):
    """How far a value may be from its code; passed to kernels, so every field is a numpy scalar.

    In units of a region's scale, the codes around one of magnitude 2^e to 2^(e+1) lie 2 * ``relative`` * 2^e apart,
    and ``least`` * 2 at least. ``rounding``: what rounding a quotient adds, over its power of two; ``offset``: what
    adding a zero point does, in scales. Beyond the ends of the grid a value may lie by ``clip`` scales and by
    ``cut``. ``source`` is what was lost, over the value, before it was encoded, and ``smallest`` the least loss.

    A scale is at most ``coarsest`` times the region's largest magnitude, unless that is at most ``vanishing``.
    """

    relative: np.float32
    least: np.float32
    rounding: np.float32
    offset: np.float32
    clip: np.float32
    cut: np.float32
    source: np.float32
    smallest: np.float32
    coarsest: np.float32
    vanishing: np.float32


class Beyond(NamedTuple):
    """How many ``values`` lie too far, and the flat index of the worst (-1: none does) and what it was allowed."""

    values: int
    worst: int
    allowed: float


def beyond(
    values: NDArray[np.float32],
    stored: NDArray[np.float32],
    region: tuple[int, int],
    scales: NDArray[np.float32],
    low: NDArray[np.float32],
    high: NDArray[np.float32],
    amax: float,
    allowance: Allowance,
) -> Beyond:
    """Compare ``values`` [rows, cols] with ``stored``, what their codes stand for, in regions of a scale each.

    ``region``: rows and columns of one, 0 for all of them. ``scales``, and the least and the largest value that each
    region's codes can stand for, ``low`` and ``high``: [rows of regions, columns of regions]. ``amax``: a magnitude
    that every region is taken to have somewhere, for those of which a tile has but a part; else 0.

    NaN equals NaN.
    """
    rows, cols = values.shape
    height, width = region[0] or max(1, rows), region[1] or max(1, cols)
    room = np.empty((3, cols), np.float32)
    found = np.array([-1.0, 0.0])
    count = _beyond(values, stored, height, width, scales, low, high, np.float32(amax), allowance, room, found)
    return Beyond(count, int(found[0]), float(found[1]))
