"""Integers of 8 or 4 bits with one scale per channel (row) or per group along a row, one byte each or packed.

``W = (code - zero) * scale``. Symmetric formats have no zero points.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .floats import FLOATS, Float, f32, u32, widen
from .native import Kernel

# float32 values from 2^23 to 2^24 lie 1 apart. This one is half-way, for integers of both signs.
WHOLE = f32(1.5 * 2**23)
_encode = Kernel("ints", "encode")
_decode = Kernel("ints", "decode")
_from_mxfp4 = Kernel("ints", "from_mxfp4")


class Integers(NamedTuple):
    """The codes of a format; passed to kernels, so every field is a numpy scalar.

    ``low`` and ``high`` bound the integers, ``levels`` is how many steps lie between. A float32 integer added to
    ``stored`` leaves the code, integer plus offset, in the low byte.
    """

    bits: np.uint32
    low: np.float32
    high: np.float32
    levels: np.float32
    stored: np.float32


def _integers(bits: int, offset: int) -> Integers:
    half = 2 ** (bits - 1)
    return Integers(u32(bits), f32(-half), f32(half - 1), f32(2 * half - 1), f32(WHOLE + offset))


INT8 = _integers(8, 0)
PACKED = {bits: _integers(bits, 2 ** (bits - 1)) for bits in (4, 8)}


class Rounding(NamedTuple):
    """Rounding a float32 to nearest even by its bits: ``(b + bias + ((b >> drop) & odd)) & keep``."""

    drop: np.uint32
    bias: np.uint32
    odd: np.uint32
    keep: np.uint32


def _rounding(dtype: Float) -> Rounding:
    """Round to the significand of ``dtype``; F16's subnormals do not matter here: all of them become integer 0."""
    drop = int(dtype.shift)
    return Rounding(u32(drop), u32(max((1 << drop) // 2 - 1, 0)), u32(drop > 0), u32(0x100000000 - (1 << drop)))


_SHORT = 512
# By how much a search shrinks the range of a region, by bits and whether it is short: the longer it is, the more is to
# be gained at 4 bits by cutting off its extremes. At 8 bits the gain is that some scales happen to suit many values.
_FACTORS = {
    (4, True): np.linspace(0.7, 1.05, 10, dtype=np.float32),
    (4, False): np.linspace(0.4, 1.07, 16, dtype=np.float32),
    (8, True): np.linspace(0.97, 1.03, 12, dtype=np.float32),
    (8, False): np.linspace(0.97, 1.03, 12, dtype=np.float32),
}
_NO_FACTORS = np.empty(0, np.float32)
_NO_ZEROS = np.empty((0, 0), np.uint32)


class EncodeRoom(NamedTuple):
    """Room for a row's codes, all zero [cols, or more for packing], and a region's other codes and values [group]."""

    codes: NDArray[np.uint8]
    other_codes: NDArray[np.uint8]
    values: NDArray[np.float32]
    squares: NDArray[np.float64]


class DecodeRoom(NamedTuple):
    """Room for a row's codes [cols, or more for packing], its values and their bits [cols]."""

    codes: NDArray[np.uint8]
    values: NDArray[np.float32]
    rounded: NDArray[np.uint32]


def _row_of_codes(payload: NDArray[np.uint8], ints: Integers) -> NDArray[np.uint8]:
    return np.zeros(payload.shape[1] * (8 // int(ints.bits)), np.uint8)


def encode(
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    ints: Integers,
    payload: NDArray[Any],
    scales: NDArray[Any],
    zeros: NDArray[np.uint32] | None = None,
    search: bool = False,
    errors: NDArray[np.float64] | None = None,
) -> int:
    """Encode a tile.

    ``w``: bits of ``dtype`` ("BF16", "F16", "F32") [rows, cols]. Written: ``payload``, codes uint8 [rows, cols]
    (INT8) or words uint32 [rows, ceil(cols * bits / 32)], the first column lowest, unused bits zero; ``scales``
    [rows, groups], groups dividing the columns evenly; for an asymmetric format ``zeros``, packed likewise along
    the rows: uint32 [ceil(rows * bits / 32), groups].

    ``reference``: compressed-tensors' arithmetic, with rnd() to ``dtype``, which is also the dtype of ``scales``;
    else the same in float32 throughout, ``scales`` F32. Symmetric: ``scale = rnd(amax / (levels / 2))``,
    ``integer = rne(clamp(rnd(w / scale)))``. Asymmetric, over min(w, 0) and max(w, 0): ``scale = rnd(rnd(max - min) /
    levels)``, ``zero = rne(clamp(rnd(low - rnd(min / scale))))``, ``integer = rne(clamp(rnd(rnd(w / scale) + zero)))``.
    A zero scale becomes the eps of its dtype.

    ``search``: shrink (or stretch) the range of each region by several factors and take the scale that leaves the least
    squared error, rounded as it is stored; the usual one if none is better. ``errors`` float64 [2]: the summed squared
    errors of the usual scales and of those taken are added.

    Returns the flat index of the first NaN or infinity in ``w`` (the outputs are then meaningless), or -1.
    """
    arithmetic = FLOATS[dtype if reference else "F32"]
    if dtype == "F16":  # so that the loops that matter, BF16's, have no step for it
        w, dtype = widen(w, dtype), "F32"
    signed = w.view(np.dtype(f"i{w.itemsize}"))
    group = w.shape[1] // max(1, scales.shape[1])
    rounding = _rounding(arithmetic)
    zeros = _NO_ZEROS if zeros is None else zeros
    factors = _FACTORS[int(ints.bits), group <= _SHORT] if search else _NO_FACTORS
    payload = payload.view(np.uint8)
    other_codes, values, squares = (np.empty(group, kind) for kind in (np.uint8, np.float32, np.float64))
    room = EncodeRoom(_row_of_codes(payload, ints), other_codes, values, squares)
    sums = np.zeros(2) if errors is None else errors
    return _encode(w, signed, FLOATS[dtype], arithmetic, rounding, ints, room, payload, scales, zeros, factors, sums)


def decode(
    payload: NDArray[Any],
    scales: NDArray[Any],
    scale_dtype: str,
    ints: Integers,
    out: NDArray[Any],
    out_dtype: str,
    zeros: NDArray[np.uint32] | None = None,
) -> None:
    """Write ``(integer - zero) * scale`` to ``out`` [rows, cols] as bits of ``out_dtype``.

    For BF16 and F16 the product is first rounded to ``scale_dtype``, as compressed-tensors' ``dequantize`` does;
    for F32 it is not rounded on the way.
    """
    through = FLOATS["F32" if out_dtype in ("F32", scale_dtype) else scale_dtype]
    group = out.shape[1] // max(1, scales.shape[1])
    zeros = _NO_ZEROS if zeros is None else zeros
    payload, cols = payload.view(np.uint8), out.shape[1]
    room = DecodeRoom(_row_of_codes(payload, ints), np.empty(cols, np.float32), np.empty(cols, np.uint32))
    scale, target = FLOATS[scale_dtype], FLOATS[out_dtype]
    _decode(payload, scales, scale, zeros, ints, group, room, through, out, target)


def from_mxfp4(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    words: NDArray[np.uint32],
    scales: NDArray[Any],
    scale_dtype: str,
) -> None:
    """Rewrite MXFP4 as symmetric packed 8-bit integers with a scale per 32 columns, always without loss.

    ``packed`` [rows, cols / 2] and ``exponents`` E8M0 [rows, cols / 32] as in `mxfp4.decode`. Written: ``words``
    [rows, cols / 4], twice the values of the codes, and ``scales``, bits of BF16 or F32 [rows, cols / 32]:
    ``2^(byte - 128)``, 1 for a group of zeros.
    """
    shift = u32(16 if scale_dtype == "F32" else 0)  # BF16 is the upper half of an F32
    _from_mxfp4(packed, packed.view(np.uint64), exponents, words.view(np.uint16), scales, shift)
