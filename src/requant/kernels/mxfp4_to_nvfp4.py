"""MXFP4 as NVFP4: the codes stay, the exponents become E4M3 powers of two below one float scale.

With kmax the largest exponent of a group that holds more than zeros, the float scale is 2^(8 - kmax) as a divisor,
and a group of exponent k has the scale 2^(8 - depth), depth = kmax - k, twice: once for each 16 of its 32 values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .native import Kernel

GROUP = 16
_transcode = Kernel("mxfp4_to_nvfp4", "transcode")
_largest_exponent = Kernel("mxfp4_to_nvfp4", "largest_exponent")


_NOTHING = np.empty(0, np.uint8), np.empty(0, np.uint16)


def _run(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    kmax: int,
    out: NDArray[np.uint8],
    scales: NDArray[np.uint16],
) -> tuple[int, int]:
    flat, deep = packed.reshape(-1), np.empty(1, np.int64)
    lost = _transcode(flat, flat.view(np.uint64), exponents.reshape(-1), kmax, out, scales, deep)
    return lost, int(deep[0])


def to_nvfp4(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    kmax: int,
    out: NDArray[np.uint8],
    scales: NDArray[np.uint8],
) -> tuple[int, int]:
    """Rewrite MXFP4 as NVFP4 with the divisor 2^(8 - kmax), without loss where that can hold it.

    ``packed`` [rows, cols / 2] and ``exponents`` E8M0 [rows, cols / 32]; ``kmax`` at least every exponent less 127
    of a group with a code that is not zero. Written: ``out`` [rows, cols / 2] and ``scales`` E4M3 [rows, cols / 16].
    Codes are copied, or halved so often as brings a scale below 2^-6 back to it, where all of a group can be.
    Groups of zeros get a scale from 2^-6 to 2^8.

    Returns the number of groups of 16 that lost something (their values, below 2^-9 of the float scale's reach, are
    rounded to nearest even), and of those whose scale is below 2^-6.
    """
    np.copyto(out, packed)
    return _run(packed, exponents, kmax, out.reshape(-1), scales.reshape(-1).view(np.uint16))


def count(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], kmax: int) -> tuple[int, int]:
    """Return what `to_nvfp4` would return, and write nothing."""
    return _run(packed, exponents, kmax, *_NOTHING)


def largest_exponent(packed: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> int:
    """Return the largest exponent byte of a group with a code that is not zero, or -1."""
    return _largest_exponent(packed.reshape(-1).view(np.uint64), exponents.reshape(-1))
