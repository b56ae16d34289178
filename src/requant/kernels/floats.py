"""BF16, F16 and F32 inside kernels: how their bits become float32 values and back, rounding to nearest even."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .jit import bits_of, float_of, kernel, left, right

u32 = np.uint32
f32 = np.float32

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
)
"""The numpy dtype of each."""


class Float(NamedTuple):
    """A float dtype as seen from float32; passed to kernels, so every field is a numpy scalar.

    ``kind`` tells the three apart, ``magnitude`` masks the sign away, ``infinity`` is the pattern from which on
    values are not finite, ``sign_shift`` moves the sign to bit 7. A magnitude shifted left by ``shift`` and
    multiplied by ``rescale`` is the float32 of the same value. ``eps`` is the gap above 1.
    """

    kind: np.uint32
    magnitude: np.uint32
    infinity: np.uint32
    sign_shift: np.uint32
    shift: np.uint32
    rescale: np.float32
    eps: np.float32


BF16, _F16, _F32 = u32(0), u32(1), u32(2)

FLOATS: Mapping[str, Float] = MappingProxyType(
    {
        "BF16": Float(BF16, u32(0x7FFF), u32(0x7F80), u32(8), u32(16), f32(1), f32(2**-7)),
        "F16": Float(_F16, u32(0x7FFF), u32(0x7C00), u32(8), u32(13), f32(2.0**112), f32(2**-10)),
        "F32": Float(_F32, u32(0x7FFFFFFF), u32(0x7F800000), u32(24), u32(0), f32(1), f32(2**-23)),
    }
)


@kernel
def magnitude(bits: Any, dtype: Float) -> Any:
    """Return |value| of ``bits`` as float32, exactly; meaningless for a value that is not finite."""
    return float_of(left(u32(bits) & dtype.magnitude, dtype.shift)) * dtype.rescale


@kernel
def amax_bits(w: Any, dtype: Float) -> Any:
    """Return the largest magnitude pattern of a row; patterns order as their values do."""
    mask = w.dtype.type(dtype.magnitude)
    largest = w.dtype.type(0)
    for c in range(w.size):
        pattern = w.dtype.type(w[c] & mask)
        if pattern > largest:  # max() would compare in 64 bits
            largest = pattern
    return largest


@kernel
def first_nonfinite(w: Any, dtype: Float) -> Any:
    """Return the index of the first NaN or infinity in a row, or -1."""
    for i in range(w.size):
        if (u32(w[i]) & dtype.magnitude) >= dtype.infinity:
            return i
    return -1


@kernel
def _amax(w: Any, dtype: Float) -> Any:
    largest = u32(amax_bits(w, dtype))
    if largest >= dtype.infinity:
        return f32(np.inf), first_nonfinite(w, dtype)
    return magnitude(largest, dtype), -1


def amax(bits: NDArray[Any], dtype: str) -> tuple[float, int]:
    """Return the largest magnitude of a C-contiguous tile of bits of ``dtype``, and -1.

    A tile with a NaN or an infinity gives inf and the flat index of the first; an empty one 0.
    """
    value, index = _amax(bits.reshape(-1), FLOATS[dtype])
    return float(value), int(index)


@kernel
def widen(bits: Any, dtype: Float) -> Any:
    """Return the float32 value of ``bits``, exactly, infinities and NaN included."""
    pattern = u32(bits) & dtype.magnitude
    sign = left(right(u32(bits), dtype.sign_shift) & u32(0x80), u32(24))
    beyond = left(pattern ^ dtype.infinity, dtype.shift) | u32(0x7F800000)
    return float_of(sign | (bits_of(magnitude(pattern, dtype)) if pattern < dtype.infinity else beyond))


@kernel
def _to_bf16(value: Any) -> Any:
    bits = bits_of(value)
    return right(u32(bits + u32(0x7FFF) + (right(bits, u32(16)) & u32(1))), u32(16))


@kernel
def _to_f16(value: Any) -> Any:
    a = bits_of(abs(value))
    sign = right(bits_of(value) ^ a, u32(16))
    # Adding 0.5 leaves the multiples of 2^-24, which F16's subnormals are, in the low bits.
    subnormal = u32(bits_of(abs(value) + f32(0.5)) - u32(0x3F000000))
    normal = right(u32(a + u32(0xFFF) + (right(a, u32(13)) & u32(1)) - u32(112 << 23)), u32(13))
    finite = subnormal if a < u32(113 << 23) else normal
    beyond = u32(0x7C00) if a <= u32(0x7F800000) else u32(0x7E00)
    return sign | (finite if a < u32(0x477FF000) else beyond)


@kernel
def narrow(value: Any, dtype: Float) -> Any:
    """Return the bits (uint32) of a float32 rounded to ``dtype``."""
    if dtype.kind == BF16:
        return _to_bf16(value)
    if dtype.kind == _F16:
        return _to_f16(value)
    return bits_of(value)


@kernel
def narrow_row(values: Any, dtype: Float, out: Any) -> None:
    """Write the bits of float32 ``values`` [n], rounded to ``dtype``, to ``out`` [n]."""
    if dtype.kind == BF16:
        for i in range(values.size):
            out[i] = _to_bf16(values[i])
    elif dtype.kind == _F16:
        for i in range(values.size):
            out[i] = _to_f16(values[i])
    else:
        for i in range(values.size):
            out[i] = bits_of(values[i])


@kernel
def widen_tile(bits: Any, dtype: Float, out: Any) -> None:
    """Write the F32 bits of ``bits`` [rows, cols] to ``out`` [rows, cols]."""
    for r in range(bits.shape[0]):
        for c in range(bits.shape[1]):
            out[r, c] = bits_of(widen(bits[r, c], dtype))
