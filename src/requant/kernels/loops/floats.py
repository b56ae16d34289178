"""BF16, F16 and F32 inside kernels: how their bits become float32 values and back, rounding to nearest even."""

from __future__ import annotations

from typing import Any

from requant.kernels.floats import BF16, F16, Float, f32, u32

from .jit import bits_of, float_of, kernel, left, right


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
def first_nonfinite_from(w: Any, row: Any, dtype: Float) -> Any:
    """Return the flat index of the first NaN or infinity of ``w`` [rows, cols] in its rows from ``row`` on, or -1."""
    for r in range(row, w.shape[0]):
        column = first_nonfinite(w[r], dtype)
        if column >= 0:
            return r * w.shape[1] + column
    return -1


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
    if dtype.kind == F16:
        return _to_f16(value)
    return bits_of(value)


@kernel
def narrow_row(values: Any, dtype: Float, out: Any) -> None:
    """Write the bits of float32 ``values`` [n], rounded to ``dtype``, to ``out`` [n]."""
    if dtype.kind == BF16:
        for i in range(values.size):
            out[i] = _to_bf16(values[i])
    elif dtype.kind == F16:
        for i in range(values.size):
            out[i] = _to_f16(values[i])
    else:
        for i in range(values.size):
            out[i] = bits_of(values[i])


@kernel
def widen_all(bits: Any, dtype: Float, out: Any) -> None:
    """Write the F32 bits of ``bits`` [n] to ``out`` [n]."""
    for i in range(bits.size):
        out[i] = bits_of(widen(bits[i], dtype))
