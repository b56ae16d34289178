"""BF16, F16 and F32 as kernels take them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .native import Kernel

_amax_bits = Kernel("floats", "amax_bits")
_first_nonfinite = Kernel("floats", "first_nonfinite")
_widen_all = Kernel("floats", "widen_all")

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


BF16, F16, F32 = u32(0), u32(1), u32(2)

FLOATS: Mapping[str, Float] = MappingProxyType(
    {
        "BF16": Float(BF16, u32(0x7FFF), u32(0x7F80), u32(8), u32(16), f32(1), f32(2**-7)),
        "F16": Float(F16, u32(0x7FFF), u32(0x7C00), u32(8), u32(13), f32(2.0**112), f32(2**-10)),
        "F32": Float(F32, u32(0x7FFFFFFF), u32(0x7F800000), u32(24), u32(0), f32(1), f32(2**-23)),
    }
)


def amax(bits: NDArray[Any], dtype: str) -> tuple[float, int]:
    """Return the largest magnitude of a C-contiguous tile of bits of ``dtype``, and -1.

    A tile with a NaN or an infinity gives inf and the flat index of the first; an empty one 0.
    """
    flat, kind = bits.reshape(-1), FLOATS[dtype]
    largest = _amax_bits(flat, kind)
    if largest >= kind.infinity:
        return np.inf, _first_nonfinite(flat, kind)
    return float(u32(largest << int(kind.shift)).view(np.float32) * kind.rescale), -1


def widen(bits: NDArray[Any], dtype: str) -> NDArray[np.uint32]:
    """Return the F32 bits of an array of bits of ``dtype``."""
    out = np.empty(bits.shape, np.uint32)
    _widen_all(bits.reshape(-1), FLOATS[dtype], out.reshape(-1))
    return out
