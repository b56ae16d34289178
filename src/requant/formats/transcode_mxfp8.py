"""Exact transcodes from MXFP8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Tile
from requant.formats.exact import ExactRoute, Pool, lossless, none_odd
from requant.formats.fp8 import BLOCK
from requant.formats.mxfp8 import GROUP

_ONE = 127


def _block_exponents(source: Sequence[Tile]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the least and the largest exponent in each block; least is above largest where there are only zeros."""
    from requant.kernels import mxfp8

    return mxfp8.block_exponents(source[0].bits, source[1].bits)


def _mixed(source: Sequence[Tile]) -> float:
    """Return 1 if the groups of a block, but those of zeros, have different exponents."""
    least, largest = _block_exponents(source)
    return float((least < largest).any())


def _mixed_at_most(scales: Sequence[Tile]) -> float:
    exponents = scales[0].bits
    rows, groups = (np.arange(0, n, step) for n, step in zip(exponents.shape, (BLOCK, BLOCK // GROUP), strict=True))
    low, high = (
        extreme.reduceat(extreme.reduceat(exponents, rows, axis=0), groups, axis=1)
        for extreme in (np.minimum, np.maximum)
    )
    return float((low < high).any())


def _to_fp8_block(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
    codes, scales = target
    np.copyto(codes.bits, source[0].bits)
    least, largest = _block_exponents(source)
    values = np.ldexp(np.float32(1), np.where(least > largest, _ONE, largest).astype(np.int32) - _ONE)
    bits = values.view(np.uint32)
    # BF16, the upper half of an F32, holds all powers from 2^-127 on.
    np.copyto(scales.bits, bits if scales.dtype == "F32" else bits >> 16, casting="same_kind")
    return 0


FROM_MXFP8: Mapping[tuple[str, str], ExactRoute] = MappingProxyType(
    {("mxfp8", "fp8-block"): lossless(_to_fp8_block, Pool(_mixed_at_most, _mixed), none_odd)}
)
"""(MXFP8, target format) → the exact route to it."""
