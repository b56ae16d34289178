"""Exact transcodes to unquantized weights: decoding, where the dtype holds every value of code * 2^k.

Microscaled weights always have power-of-two scales; an FP8 weight qualifies if all of its scales are such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Format, Tile
from requant.formats.dense import VALUE_DTYPES
from requant.formats.exact import ExactRoute, Pool, none_odd
from requant.formats.fp8 import BLOCK, Fp8Block, Fp8Channel, Fp8Tensor
from requant.formats.mxfp4 import GROUP, Mxfp4
from requant.formats.mxfp8 import Mxfp8
from requant.formats.powers import exponents_of, pool_of_powers, wide

_BYTES = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)[:, None]
_E2M1 = np.stack([_BYTES & 15, _BYTES >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn).astype(np.float64)

_RANGE = {"BF16": (-133, 127), "F16": (-24, 15), "F32": (-149, 127)}
"""Dtype → the exponents of its smallest subnormal and of its largest power of two."""


class _Source(NamedTuple):
    """A format with power-of-two scales.

    ``values`` [256, codes per byte] of a payload's byte; ``region`` (rows, bytes of the payload) that share a scale,
    0 for all of a tile; ``least`` and ``most`` the exponents of the smallest value and of the largest; ``exponents``
    those of the scales; ``pool`` tells whether they are powers of two.
    """

    format: Format
    values: NDArray[np.float64]
    region: tuple[int, int]
    least: int
    most: int
    exponents: Callable[[Tile], NDArray[np.int32]]
    pool: Pool | None


def _route(source: _Source, dtype: str) -> ExactRoute:
    height, width = source.region
    smallest, largest = _RANGE[dtype]

    def suspects(scales: Sequence[Tile], _pooled: float) -> NDArray[np.bool_]:
        exponents = source.exponents(scales[0])
        outside: NDArray[np.bool_] = (exponents < smallest - source.least) | (exponents > largest - source.most)
        return outside

    def over_span(parts: Sequence[Tile], pooled: float) -> int:
        outside = suspects(parts[1:], pooled)
        bands = np.flatnonzero(outside.any(axis=1))
        if not bands.size:
            return 0
        payload = parts[0].bits
        exponents = source.exponents(parts[1])
        least = int(exponents.min())
        lost = _lost(source.values, np.arange(least, int(exponents.max()) + 1), dtype)
        step, band_rows = width or payload.shape[1], height or payload.shape[0]
        starts = np.arange(0, payload.shape[1], step)
        widths = np.diff(starts, append=payload.shape[1]) * source.format.packing
        count = 0
        for band in bands:
            rows = payload[band * band_rows : band * band_rows + band_rows]
            row_of = (exponents[band] - least).repeat(step)[: rows.shape[1]]
            regions = np.logical_or.reduceat(lost[row_of, rows].any(axis=0), starts)
            count += int(widths[regions].sum()) * rows.shape[0]
        return count

    def transcode(parts: Sequence[Tile], target: Sequence[Tile], pooled: float) -> int:
        # F32 scales: a product is rounded once.
        exact = parts if source.pool is None else (parts[0], wide(parts[1]))
        source.format.decode(exact, target[0])
        return over_span(parts, pooled)

    holds = None if source.pool is None else none_odd
    return ExactRoute(transcode, suspects, over_span, source.pool, holds)


def _lost(values: NDArray[np.float64], exponents: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    """Tell [exponent, byte] whether ``dtype`` cannot hold a value of the byte times 2^exponent; it can hold NaN."""
    scaled = values * 2.0 ** exponents[:, None, None]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        kept = scaled.astype(VALUE_DTYPES[dtype]).astype(np.float64)
    lost: NDArray[np.bool_] = np.any((kept != scaled) & ~np.isnan(scaled), axis=-1)
    return lost


def _byte_exponents(scales: Tile) -> NDArray[np.int32]:
    return scales.bits.astype(np.int32) - 127


_SOURCES = (
    _Source(Mxfp4(), _E2M1, (1, GROUP // 2), -1, 2, _byte_exponents, None),
    _Source(Mxfp8(), _E4M3, (1, GROUP), -9, 8, _byte_exponents, None),
    _Source(Fp8Channel(), _E4M3, (1, 0), -9, 8, exponents_of, pool_of_powers(None)),
    _Source(Fp8Tensor(), _E4M3, (0, 0), -9, 8, exponents_of, pool_of_powers(None)),
    _Source(Fp8Block(), _E4M3, (BLOCK, BLOCK), -9, 8, exponents_of, pool_of_powers(None)),
)

FP8_AND_MX_TO_DENSE: Mapping[tuple[str, str], ExactRoute] = MappingProxyType(
    {(source.format.name, dtype): _route(source, dtype) for source in _SOURCES for dtype in _RANGE}
)
"""(source format, dtype of the unquantized weight) → the exact route between them."""
