"""Exact transcodes from MXFP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Tile
from requant.formats.exact import ExactRoute, Pool, lossless

_BIAS = 127
# The exponent whose groups get an NVFP4 float scale of 1; exponents down to 17 below the largest lose nothing.
_EXPONENT_OF_ONE = 8
_NVFP4_RANGE = 17


def _to_fp8(block: bool) -> ExactRoute:
    def transcode(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
        from requant.kernels import mxfp4

        kernel = mxfp4.to_fp8_block if block else mxfp4.to_fp8_channel
        scales = np.empty(target[1].bits.shape, np.uint16)
        over_span = kernel(source[0].bits, source[1].bits, target[0].bits, scales)
        _store(scales, target[1])
        return over_span

    def suspects(scales: Sequence[Tile], _pooled: float) -> NDArray[np.bool_]:
        from requant.kernels import mxfp4

        return mxfp4.suspects(scales[0].bits, block)

    def over_span(source: Sequence[Tile], _pooled: float) -> int:
        from requant.kernels import mxfp4

        return mxfp4.over_span(source[0].bits, source[1].bits, block)

    return ExactRoute(transcode, suspects, over_span)


def _store(bf16: NDArray[np.uint16], scales: Tile) -> None:
    """Write scales that are powers of two as BF16 or F32."""
    if scales.dtype == "F32":
        np.left_shift(bf16, 16, out=scales.bits, dtype=np.uint32)  # BF16 is the upper half of an F32
    else:
        scales.bits[:] = bf16


def _to_fp8_tensor() -> ExactRoute:
    """One scale: pooled is floor(log2(amax)) of the weight. Rows stand for the region, which no tile sees whole."""

    def top(pooled: float) -> int | None:
        return int(pooled) if pooled > -np.inf else None

    def bound(scales: Sequence[Tile]) -> float:
        return float(scales[0].bits.max(initial=0)) - 127 + 2

    def of(source: Sequence[Tile]) -> float:
        from requant.kernels import mxfp4

        log2 = mxfp4.log2_amax(source[0].bits, source[1].bits)
        return -np.inf if log2 is None else float(log2)

    def transcode(source: Sequence[Tile], target: Sequence[Tile], pooled: float) -> int:
        from requant.kernels import mxfp4

        scale = np.empty(1, np.uint16)
        rounded = mxfp4.to_fp8_tensor(source[0].bits, source[1].bits, top(pooled), target[0].bits, scale)
        _store(scale, target[1])
        return rounded

    def suspects(scales: Sequence[Tile], pooled: float) -> NDArray[np.bool_]:
        from requant.kernels import mxfp4

        return mxfp4.suspects_tensor(scales[0].bits, top(pooled))

    def over_span(source: Sequence[Tile], pooled: float) -> int:
        from requant.kernels import mxfp4

        return mxfp4.over_span_tensor(source[0].bits, source[1].bits, top(pooled))

    return ExactRoute(transcode, suspects, over_span, Pool(bound, of))


def _to_mxfp8(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
    from requant.kernels import mxfp8

    mxfp8.from_mxfp4(source[0].bits, source[1].bits, target[0].bits, target[1].bits)
    return 0


def _bound(scales: Sequence[Tile]) -> float:
    return float(scales[0].bits.max(initial=0)) - _BIAS


def _largest(source: Sequence[Tile]) -> float:
    from requant.kernels import mxfp4_to_nvfp4

    byte = mxfp4_to_nvfp4.largest_exponent(source[0].bits, source[1].bits)
    return float(byte - _BIAS) if byte >= 0 else -np.inf


def _to_nvfp4(divides: bool) -> ExactRoute:
    """Pooled is the largest exponent of a group that holds more than zeros; a region is a group of 16."""
    # The float scale and its reciprocal stay within float32; as a multiplier it stays normal.
    least = -119 if divides else -118

    def kmax(pooled: float) -> int:
        return int(max(pooled, least)) if pooled > -np.inf else _EXPONENT_OF_ONE

    def transcode(source: Sequence[Tile], target: Sequence[Tile], pooled: float) -> int:
        from requant.kernels import mxfp4_to_nvfp4

        top = kmax(pooled)
        target[2].bits.view(np.float32)[:] = 2.0 ** (_EXPONENT_OF_ONE - top if divides else top - _EXPONENT_OF_ONE)
        lost, _ = mxfp4_to_nvfp4.to_nvfp4(source[0].bits, source[1].bits, top, target[0].bits, target[1].bits)
        return lost * mxfp4_to_nvfp4.GROUP

    def suspects(scales: Sequence[Tile], pooled: float) -> NDArray[np.bool_]:
        return np.repeat(scales[0].bits < kmax(pooled) + _BIAS - _NVFP4_RANGE, 2, axis=1)

    def over_span(source: Sequence[Tile], pooled: float) -> int:
        from requant.kernels import mxfp4_to_nvfp4

        return mxfp4_to_nvfp4.count(source[0].bits, source[1].bits, kmax(pooled))[0] * mxfp4_to_nvfp4.GROUP

    return ExactRoute(transcode, suspects, over_span, Pool(_bound, _largest))


def _to_int8(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
    from requant.kernels import ints

    packed, exponents = source
    words, scales = target[:2]  # the third, the shape of the whole weight, is not a tile's to know
    ints.from_mxfp4(packed.bits, exponents.bits, words.bits, scales.bits, scales.dtype)
    return 0


FROM_MXFP4: Mapping[tuple[str, str], ExactRoute] = MappingProxyType(
    {
        ("mxfp4", "fp8-block"): _to_fp8(block=True),
        ("mxfp4", "fp8-channel"): _to_fp8(block=False),
        ("mxfp4", "fp8-tensor"): _to_fp8_tensor(),
        ("mxfp4", "int8-g32"): lossless(_to_int8),
        ("mxfp4", "mxfp8"): lossless(_to_mxfp8),
        ("mxfp4", "nvfp4"): _to_nvfp4(divides=True),
        ("mxfp4", "nvfp4-scale2"): _to_nvfp4(divides=False),
    }
)
"""(MXFP4, target format) → the exact route to it."""
