"""MXFP4: groups of 32 FP4 E2M1 values along a row that share a power-of-two (E8M0) scale; and its way to FP8."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import mx
from .floats import f32
from .mx import GROUP
from .native import Kernel

BLOCK = 128
_decode = Kernel("mxfp4", "decode")
_to_fp8 = Kernel("mxfp4", "to_fp8")
_log2_amax = Kernel("mxfp4", "log2_amax")
_suspects = Kernel("mxfp4", "suspects")

_E2M1 = np.outer([1, -1], [0, 0.5, 1, 1.5, 2, 3, 4, 6]).ravel()
# [byte, 2]: the even column is the low nibble.
PAIRS = _E2M1[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)]


@cache
def _decoded(dtype: str) -> NDArray[Any]:
    """Return [exponent, byte] the two values of a byte of codes, as a word of their bits in ``dtype``."""
    words: NDArray[Any] = mx.table(PAIRS, dtype).view(np.uint64 if dtype == "F32" else np.uint32)
    return words[..., 0]


def decode(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], out: NDArray[Any], out_dtype: str) -> None:
    """Write ``e2m1 * 2^(byte - 127)`` to ``out`` [rows, cols] as bits of ``out_dtype``.

    ``packed`` [rows, cols / 2], even column in the low nibble; ``exponents`` E8M0 [rows, cols / 32]. Exact in
    float32 and BF16 up to byte 252; F16 rounds to nearest even.
    """
    decoded = _decoded(out_dtype)
    _decode(packed.reshape(-1), exponents.reshape(-1), decoded, out.reshape(-1).view(decoded.dtype))


# The largest magnitude that rounds to zero: half the smallest subnormal. A zero has no sign.
_VANISHING = {"BF16": f32(2.0**-134), "F16": f32(2.0**-25), "F32": f32(0)}


def encode(
    w: NDArray[Any],
    dtype: str,
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    search: bool = False,
    errors: NDArray[np.float64] | None = None,
) -> int:
    """Encode a tile; see `mx.encode`. A negative value that its code cannot hold keeps its sign, -0.0 does not.

    Written: ``packed`` [rows, cols / 2], even column in the low nibble, and ``exponents`` [rows, cols / 32].
    """
    return mx.encode(w, dtype, mx.E2M1, _VANISHING[dtype], search, packed, exponents, errors)


# No value of a group whose 0.5 is at most this many binades below 2^8 can be lost: there, it is E4M3's smallest number.
SAFE_DEPTH = 17
ALL_ZERO = -1000
UNKNOWN = 1000


def scale_exponent(top: int) -> int:
    """Return the exponent of the FP8 scale of a region whose floor(log2(amax)) is ``top``, or ALL_ZERO.

    It puts amax into E4M3's top binade, 2^8, and is at least that of BF16's smallest normal; 0 if all is zero.
    """
    return 0 if top == ALL_ZERO else max(top - 8, -126)


def _run(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    block: bool,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint16],
    top: int = UNKNOWN,
) -> int:
    rows, groups = exponents.shape
    height, width = (BLOCK, BLOCK // GROUP) if block else (1, groups)
    words = packed.view(np.uint64).reshape(rows, groups, 2)
    return _to_fp8(packed, words, exponents, top, height, width, _room(groups), codes, scales)


class Room(NamedTuple):
    """Room for the least and the largest exponent of each column of groups, and its scale's, each [groups]."""

    low: NDArray[np.uint8]
    high: NDArray[np.uint8]
    scale_exponents: NDArray[np.int64]


def _room(groups: int) -> Room:
    return Room(np.empty(groups, np.uint8), np.empty(groups, np.uint8), np.empty(groups, np.int64))


_NO_CODES = np.empty((0, 0), np.uint8)
_NO_SCALES = np.empty((0, 0), np.uint16)


def to_fp8_block(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint16],
) -> int:
    """Rewrite MXFP4 as FP8 with one power-of-two scale per 128 x 128 block, without loss where E4M3 can hold it.

    Written: ``codes`` E4M3 [rows, cols] and ``scales``, BF16 bits [ceil(rows / 128), ceil(cols / 128)]:
    ``2^(floor(log2(amax)) - 8)``, at least 2^-126, 1 for a block of zeros. The tile starts at a block's first row.

    Returns the number of values in over-span blocks, those with a value that is no multiple of ``scale * 2^-9``
    (0: nothing was lost). Their values are rounded to nearest even.
    """
    return _run(packed, exponents, True, codes, scales)


def to_fp8_channel(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint16],
) -> int:
    """As `to_fp8_block`, with one scale per row: ``scales`` [rows, 1]."""
    return _run(packed, exponents, False, codes, scales)


def to_fp8_tensor(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    top: int | None,
    codes: NDArray[np.uint8],
    scale: NDArray[np.uint16],
) -> int:
    """As `to_fp8_block`, with the one scale [1] of a whole weight, of which this is a tile.

    ``top`` is floor(log2(amax)) of the weight, None if it is all zeros. A tile does not see all that shares the scale:
    the values counted are those of the rows that hold one that E4M3 cannot.
    """
    scales = np.empty((exponents.shape[0], 1), np.uint16)
    scale[0] = (scale_exponent(_known(top)) + 127) << 7
    return _run(packed, exponents, False, codes, scales, _known(top))


def _known(top: int | None) -> int:
    return ALL_ZERO if top is None else top


def over_span(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], block: bool) -> int:
    """Return what `to_fp8_block` (or, not ``block``, `to_fp8_channel`) would return, and write nothing."""
    return _run(packed, exponents, block, _NO_CODES, _NO_SCALES)


def over_span_tensor(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], top: int | None) -> int:
    """Return what `to_fp8_tensor` would return, and write nothing."""
    return _run(packed, exponents, False, _NO_CODES, _NO_SCALES, _known(top))


def log2_amax(packed: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> int | None:
    """Return floor(log2(largest magnitude)) of a tile, or None if all of it is zero."""
    rows, groups = exponents.shape
    largest = int(exponents.max(initial=0))
    top = _log2_amax(packed.view(np.uint64).reshape(rows, groups, 2), exponents, largest)
    return None if top == ALL_ZERO else top


def suspects(exponents: NDArray[np.uint8], block: bool) -> NDArray[np.bool_]:
    """Tell which regions may be over-span, judged by their exponents [rows, cols / 32] alone.

    Returns bool [ceil(rows / 128), ceil(cols / 128)], or [rows, 1] if not ``block``. Exponents within 14 of each
    other are always exact; a region beyond may still be (its outliers may be groups of zeros).
    """
    rows, groups = exponents.shape
    height, width = (BLOCK, BLOCK // GROUP) if block else (1, groups)
    out = np.empty((-(-rows // height), -(-groups // width)), np.bool_)
    _suspects(exponents, height, width, _room(groups), out)
    return out


def suspects_tensor(exponents: NDArray[np.uint8], top: int | None) -> NDArray[np.bool_]:
    """Tell which rows of a tile [rows, 1] may hold a value that `to_fp8_tensor` rounds, judged by their exponents."""
    deepest = scale_exponent(_known(top)) + 9 - SAFE_DEPTH + 127
    lowest: NDArray[np.bool_] = exponents.min(axis=1, keepdims=True, initial=255) < deepest
    return lowest
