"""FP8 E4M3 with one scale per channel (row), per 128 x 128 block, or per tensor: ``W = code * scale``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .floats import FLOATS, Float, f32, u32, widen
from .native import Kernel

BLOCK = 128
_NAN = u32(0x7FC00000)
_encode_channel = Kernel("fp8", "encode_channel")
_encode_block = Kernel("fp8", "encode_block")
_encode_tensor = Kernel("fp8", "encode_tensor")
_decode = Kernel("fp8", "decode")


class Rounding(NamedTuple):
    """Rounding a positive float32 to nearest even by its bits: ``(b + bias + ((b >> drop) & odd)) & keep``."""

    drop: np.uint32
    bias: np.uint32
    odd: np.uint32
    keep: np.uint32


def rounding_to(dtype: Float) -> Rounding:
    """Round to the significand of ``dtype``; F16's subnormals do not matter here: all of them have code 0."""
    drop = int(dtype.shift)
    return Rounding(u32(drop), u32(max((1 << drop) // 2 - 1, 0)), u32(drop > 0), u32(0x100000000 - (1 << drop)))


def _operands(
    w: NDArray[Any], dtype: str, reference: bool, scale_dtype: str | None, power_of_two: bool
) -> tuple[NDArray[Any], Float, Rounding, Float, bool]:
    """Return what the encoders take first: the tile, how to read it, round its quotients, store and find its scales.

    F16 goes through F32, so that the loop that matters, BF16's, has no step for it.
    """
    arithmetic = FLOATS[dtype if reference else "F32"]
    stored = arithmetic if scale_dtype is None else FLOATS[scale_dtype]
    if dtype == "F16":
        w, dtype = widen(w, dtype), "F32"
    return w, FLOATS[dtype], rounding_to(arithmetic), stored, power_of_two


def encode_channel(
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str | None = None,
    power_of_two: bool = False,
) -> int:
    """Encode a tile with one scale per row.

    ``w``: bits of ``dtype`` ("BF16", "F16", "F32") [rows, cols]; written: ``codes`` E4M3 [rows, cols] and
    ``scales`` [rows, 1], bits of ``scale_dtype``. ``reference``: compressed-tensors' arithmetic,
    ``scale = rnd(amax / 448)`` and ``code = e4m3(clamp(rnd(w / scale)))`` with rnd() to ``dtype``; else the same in
    float32 throughout. The scale is rounded to ``scale_dtype``, which is that of the arithmetic unless told
    otherwise; a zero scale becomes its eps.

    ``power_of_two``: ``scale = 2^ceil(log2(amax / 448))`` instead, not below the dtype's smallest normal number (F16:
    its smallest subnormal), and 1 where amax is zero. Every quotient is then exact.

    Returns the flat index of the first NaN or infinity in ``w`` (the outputs are then meaningless), or -1.
    """
    return _encode_channel(*_operands(w, dtype, reference, scale_dtype, power_of_two), codes, scales)


def encode_block(
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str | None = None,
    power_of_two: bool = False,
) -> int:
    """Encode a tile with one scale per 128 x 128 block; the tile starts at a block's first row.

    As `encode_channel`, with ``scales`` [ceil(rows / 128), ceil(cols / 128)]; blocks at the right and lower edge
    may be smaller.
    """
    operands = _operands(w, dtype, reference, scale_dtype, power_of_two)
    column_amax, divisors = np.empty(w.shape[1], operands[0].dtype), np.empty(w.shape[1], np.float32)
    return _encode_block(*operands, column_amax, divisors, codes, scales)


def encode_tensor(
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    amax: float,
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str | None = None,
    power_of_two: bool = False,
) -> int:
    """Encode a tile with the scale of the whole weight, whose largest magnitude is ``amax``.

    As `encode_channel`, with a single scale in ``scales`` [1].
    """
    operands = _operands(w.reshape(-1), dtype, reference, scale_dtype, power_of_two)
    return _encode_tensor(*operands, f32(amax), codes.reshape(-1), scales)


def decode(
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str,
    block: tuple[int, int],
    out: NDArray[Any],
    out_dtype: str,
) -> None:
    """Write ``codes * scales`` to ``out`` [rows, cols] as bits of ``out_dtype``.

    ``scales``: bits of ``scale_dtype``, one per ``block`` (height, width) of the tile; E8M0 exponents are read as
    F32, 2^(byte - 127), 255 as NaN. For BF16 and F16 the product is first rounded to ``scale_dtype``, as
    compressed-tensors' ``dequantize`` does; for F32 it is not rounded on the way.
    """
    if scale_dtype == "F8_E8M0":
        scales, scale_dtype = _powers(scales), "F32"
    height, width = block
    through = FLOATS["F32" if out_dtype in ("F32", scale_dtype) else scale_dtype]
    factors = np.empty(codes.shape[1], np.float32)
    _decode(codes, scales, FLOATS[scale_dtype], height, width, through, factors, out, FLOATS[out_dtype])


def _powers(exponents: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the F32 bits of E8M0 exponents; 2^-127 is a subnormal."""
    bits = exponents.astype(np.uint32) << u32(23)
    bits[exponents == 0] = u32(1 << 22)
    bits[exponents == 255] = _NAN
    return bits
