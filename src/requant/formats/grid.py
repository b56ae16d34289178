"""How far what a format stores may be from what it was made of.

An encoder takes a scale s from a region's largest magnitude, divides by it and takes the nearest code. A value thus
lies within half a gap of its code, times s. To that adds:

- what is rounded on the way: under LLM Compressor's arithmetic the quotient, to the dtype of the weight, by up to 2^-8
  (BF16) of its power of two. In asymmetric integers the sum with the zero point, below 8, is rounded as well.
- what lies beyond the last code. A scale is rounded, by half a step of its dtype, so that the largest magnitude need
  not become the last code; and a search for the least error may cut it off on purpose.

And a scale must not be larger than some encoder makes it: with a coarse one, even the nearest code may be far away.
Where a region is so small that its dtype has no scale for it, it may: encoders put another in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Tile
from requant.formats.powers import wide
from requant.kernels.bounds import Allowance

ROUNDING = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24}
"""What rounding to a dtype changes at most, over the power of two below the value."""

SMALLEST = {"BF16": 2.0**-133, "F16": 2.0**-24, "F32": 2.0**-149}
"""The smallest number above zero of a dtype."""

NORMAL = {"BF16": 2.0**-126, "F16": 2.0**-14, "F32": 2.0**-126}
"""The smallest number of a dtype with all of its digits."""

_FINE = {"BF16": 2.0**-120, "F16": 2.0**-18, "F32": 2.0**-120}
"""From here on no encoder's scale is far from what it wants: F16's subnormals have six digits by then."""

_MARGIN = 1 + 2.0**-6
"""For roundings of the scale and of the amax that it follows from."""


class Grid(NamedTuple):
    """The codes that some rows of a weight can have.

    ``region``: rows and columns that share a scale, 0 for all; with rows 0 all of the weight's, not of the tile's.
    ``scales``, and the least and the largest value to be had with each, are float32, one of each per region.
    ``pooled`` is the largest value that any scale allows, where all of the weight, or of a fused group, decide on it.
    """

    region: tuple[int, int]
    scales: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    allowance: Allowance
    pooled: float = 0.0


def values_of_scales(scales: Tile) -> NDArray[np.float32]:
    """Return float or E8M0 scales as float32 [rows, columns]."""
    if scales.dtype == "U8":
        return np.ldexp(np.float32(1), scales.bits.astype(np.int32) - 127)
    return wide(scales).bits.view(np.float32).reshape(scales.bits.shape)


def e4m3(region: tuple[int, int], scales: Tile, dtype: str) -> Grid:
    """FP8: gaps of 2^-3 of a value's power of two, 2^-9 below 2^-6.

    amax becomes 448, between 448 and 224 under a power of two; a search goes from 2^(-1/32) to 2^(63/64) of that scale,
    below which nothing is cut off that half a gap, 16, does not cover.
    """
    factors = values_of_scales(scales)
    stored = scales.dtype if scales.dtype in ROUNDING else "F32"
    cut = 448 * SMALLEST[stored] / 2
    allowance = _allowance(
        2.0**-4,
        2.0**-10,
        rounding=ROUNDING[dtype],
        cut=cut,
        coarsest=_MARGIN / 224,
        vanishing=448 * _FINE[stored],
    )
    return Grid(region, factors, -448 * factors, 448 * factors, allowance)


def microscaled(largest: float, digits: int, least: float, region: tuple[int, int], scales: Tile, dtype: str) -> Grid:
    """MXFP4 and MXFP8: ``largest`` is the format's largest value, ``digits`` the bits of its significand.

    The power of two is that with which amax comes to lie between 7/12 and 7/6 (MXFP4; MXFP8: 1/2 and 1) of the largest
    code; a search takes the next above or below. LLM Compressor's rule gives F16's subnormals a scale of 1.
    """
    factors = values_of_scales(scales)
    top = 2.0 ** np.floor(np.log2(largest)) * 1.75
    allowance = _allowance(
        2.0**-digits,
        least,
        clip=2 * top - largest,
        coarsest=_MARGIN * 4 / top,
        vanishing=NORMAL["F16"] if dtype == "F16" else _FINE[dtype],
    )
    return Grid(region, factors, -largest * factors, largest * factors, allowance)


def nvfp4(group: int, scales: NDArray[np.float32], unit: float) -> Grid:
    """NVFP4: gaps of 2^-1 of a value's power of two, 2^-1 below 1; ``unit`` is the block scale of 1.

    A group's scale is amax / 6 in E4M3: within 2^-4, or 2^-10 units. A search goes from one code below to five above,
    which is 2^-3 down and 5/8 up. A group of less than 6 * 2^-6 units may have one of E4M3's subnormals, few of which
    are near to what it wants, or 2^-3 in place of zero.
    """
    allowance = _allowance(
        2.0**-2,
        2.0**-2,
        clip=6 * 2.0**-2,
        cut=9 * 2.0**-9 * unit,
        coarsest=_MARGIN * (1 + 2.0**-4) * 1.625 / 6,
        vanishing=6 * 2.0**-6 * unit,
    )
    return Grid((1, group), scales, -6 * scales, 6 * scales, allowance, pooled=6 * 448 * unit)


def integers(bits: int, group: int, scales: Tile, zeros: NDArray[np.float32] | None, dtype: str) -> Grid:
    """Integers, a gap of 1: ``group`` columns share a scale, 0: all; ``zeros`` are the zero points, None: all are 0.

    A search shrinks the range by 0.97 to 1.03 (8 bits), 0.7 to 1.05 or, from 512 columns on, 0.4 to 1.07 (4 bits).
    """
    factors = values_of_scales(scales)
    levels = 2**bits - 1
    shrunk, widened = (0.97, 1.03) if bits == 8 else (0.4, 1.07)
    if bits == 4 and 0 < group <= 512:
        shrunk, widened = 0.7, 1.05
    range_ = levels / 2 if zeros is None else levels
    allowance = _allowance(
        0.0,
        0.5,
        rounding=ROUNDING[dtype],
        offset=0.0 if zeros is None else 4 * _MARGIN * ROUNDING[dtype],
        clip=range_ * (_MARGIN / shrunk - 1) + 1,
        cut=levels * SMALLEST[scales.dtype] / 2,
        coarsest=_MARGIN * widened * 2 / levels,
        vanishing=levels * _FINE[scales.dtype],
    )
    middle = np.zeros((1, 1), np.float32) if zeros is None else zeros
    half = np.float32(2 ** (bits - 1))
    return Grid((1, group), factors, (-half - middle) * factors, (half - 1 - middle) * factors, allowance)


def dense(values: Tile) -> Grid:
    """Unquantized: gaps of the dtype's digits."""
    rows = max(1, values.bits.shape[0])
    ones, beyond = np.ones((rows, 1), np.float32), np.full((rows, 1), np.inf, np.float32)
    allowance = _allowance(ROUNDING[values.dtype], SMALLEST[values.dtype] / 2, vanishing=np.inf)
    return Grid((1, 0), ones, -beyond, beyond, allowance)


def lost_before(grid: Grid, dtypes: Sequence[str]) -> Grid:
    """Return the grid for values that were rounded to ``dtypes``, one after the other, before they were encoded."""
    source = sum(ROUNDING[dtype] for dtype in dtypes) * _MARGIN
    smallest = sum(SMALLEST[dtype] for dtype in dtypes) + float(grid.allowance.smallest)
    allowance = grid.allowance._replace(source=np.float32(source), smallest=np.float32(smallest))
    return grid._replace(allowance=allowance)


def _allowance(
    relative: float,
    least: float,
    rounding: float = 0.0,
    offset: float = 0.0,
    clip: float = 0.0,
    cut: float = 0.0,
    coarsest: float = 0.0,
    vanishing: float = 0.0,
) -> Allowance:
    rounding += 2 * ROUNDING["F32"]  # of quotient and product, whatever the arithmetic
    numbers = (relative, least, rounding, offset, clip, cut, 0.0, SMALLEST["F32"], coarsest, vanishing)
    return Allowance(*map(np.float32, numbers))
