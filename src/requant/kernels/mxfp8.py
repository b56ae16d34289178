"""MXFP8: groups of 32 FP8 E4M3 values along a row that share a power-of-two (E8M0) scale."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import mx
from .floats import f32, widen
from .mx import GROUP
from .native import Kernel

BLOCK = 128
_decode = Kernel("mxfp8", "decode")
_from_mxfp4 = Kernel("mxfp8", "from_mxfp4")
_block_exponents = Kernel("mxfp8", "block_exponents")

_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@cache
def _decoded(dtype: str) -> NDArray[Any]:
    """Return [exponent, code] the bits of a value in ``dtype``."""
    return mx.table(_E4M3, dtype).view(np.uint32 if dtype == "F32" else np.uint16)


def decode(codes: NDArray[np.uint8], exponents: NDArray[np.uint8], out: NDArray[Any], out_dtype: str) -> None:
    """Write ``e4m3 * 2^(byte - 127)`` to ``out`` [rows, cols] as bits of ``out_dtype``.

    ``codes`` [rows, cols], ``exponents`` E8M0 [rows, cols / 32]. Exact in float32 up to byte 246, in BF16 from 3 on;
    otherwise rounded to nearest even.
    """
    _decode(codes.reshape(-1), exponents.reshape(-1), _decoded(out_dtype), out.reshape(-1))


def encode(
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    codes: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    search: bool = False,
    errors: NDArray[np.float64] | None = None,
) -> int:
    """Encode a tile; see `mx.encode`. Zeros and values that become zero keep their sign.

    ``reference``: compressed-tensors' arithmetic in ``dtype``; else float32's, which differs for F16 alone: there are
    no subnormal groups, none too large, and zeros have exponent 0.
    Written: ``codes`` E4M3 [rows, cols] and ``exponents`` [rows, cols / 32].
    """
    if dtype == "F16" and not reference:
        w, dtype = widen(w, dtype), "F32"
    return mx.encode(w, dtype, mx.E4M3, f32(-1), search, codes, exponents, errors)


def from_mxfp4(
    packed: NDArray[np.uint8], exponents: NDArray[np.uint8], codes: NDArray[np.uint8], lowered: NDArray[np.uint8]
) -> None:
    """Rewrite MXFP4 ``packed`` [rows, cols / 2], ``exponents`` [rows, cols / 32] as MXFP8, without loss.

    Exponents go down by 6, or to 0 if that is less, codes up by as much: E4M3 holds 0.5 * 2^0 to 6 * 2^6.
    Written: ``codes`` [rows, cols] and ``lowered``, the new exponents [rows, cols / 32].
    """
    pairs = codes.reshape(-1).view(np.uint16)
    _from_mxfp4(packed.reshape(-1), exponents.reshape(-1), pairs, lowered.reshape(-1))


def block_exponents(
    codes: NDArray[np.uint8], exponents: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the least and the largest exponent in each 128 x 128 block, without those of groups of zeros.

    ``codes`` [rows, cols], ``exponents`` [rows, cols / 32]; both results [ceil(rows / 128), ceil(cols / 128)]. Where
    all is zero they are 255 and 0.
    """
    rows, groups = exponents.shape
    shape = -(-rows // BLOCK), -(-groups * GROUP // BLOCK)
    least, largest = np.full(shape, 255, np.uint8), np.zeros(shape, np.uint8)
    _block_exponents(codes.view(np.uint64).reshape(rows, groups, GROUP // 8), exponents, least, largest)
    return least, largest
