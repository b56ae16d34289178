"""Microscaling: groups of 32 small floats along a row that share a power-of-two (E8M0) scale; how both are found."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .floats import DTYPES, FLOATS, f32, u32
from .native import Kernel

GROUP = 32
_encode = Kernel("mx", "encode")


def table(values: NDArray[np.float64], dtype: str) -> NDArray[Any]:
    """Return ``values * 2^(byte - 127)`` in ``dtype``, the byte first; NaN for byte 255, Inf beyond the dtype."""
    scales = 2.0 ** (np.arange(256) - 127.0)
    scales[255] = np.nan
    with np.errstate(over="ignore", invalid="ignore"):
        scaled: NDArray[Any] = np.multiply.outer(scales, values).astype(np.float32).astype(DTYPES[dtype])
    return scaled


class Element(NamedTuple):
    """A small float as seen from float32; passed to kernels, so every field is a numpy scalar.

    ``largest`` is its largest value, ``smallest`` the bits of its smallest normal one, ``drop`` how many bits of a
    float32's significand it has not, ``offset`` the exponent of its largest power of two. Its sign is the bit
    ``sign``, where a float32's bits shifted right by ``sign_shift`` have it. ``mask`` covers its other bits.
    """

    largest: np.float32
    smallest: np.uint32
    drop: np.uint32
    offset: np.uint32
    sign_shift: np.uint32
    sign: np.uint32
    mask: np.uint32


E2M1 = Element(f32(6), u32(127 << 23), u32(22), u32(2), u32(28), u32(0x08), u32(0x07))
E4M3 = Element(f32(448), u32(121 << 23), u32(20), u32(8), u32(24), u32(0x80), u32(0x7F))

# The exponent of a group of zeros: 2^-127, which F16 cannot hold; compressed-tensors replaces that zero by 1.
_UNSCALED = {"BF16": u32(0), "F16": u32(127), "F32": u32(0)}


def encode(
    w: NDArray[Any],
    dtype: str,
    element: Element,
    vanishing: np.float32,
    search: bool,
    payload: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    errors: NDArray[np.float64] | None,
) -> int:
    """Encode a tile of bits of ``dtype`` [rows, cols], cols % 32 = 0, with compressed-tensors' arithmetic.

    ``exponent = floor(log2(amax))``, one more from 1.75 on, less ``element.offset``; codes of ``w / scale``, to
    nearest even, with the sign of what exceeds ``vanishing``. With ``search``, of the exponents one below to one
    above, that with the least squared error; the first on ties. ``errors`` [2] gets added the summed squared errors
    of the exponents from amax and of those chosen.
    Written: ``payload`` [rows, cols] or, two codes a byte, [rows, cols / 2], and ``exponents`` [rows, cols / 32].

    Returns the flat index of the first value that is NaN, infinite or too large for the rule (from 1.75 times the
    dtype's highest power of two on; the outputs are then meaningless), or -1.
    """
    flat = w.reshape(-1), payload.reshape(-1), exponents.reshape(-1)
    sums = np.zeros(2) if errors is None else errors
    return _encode(flat[0], FLOATS[dtype], element, _UNSCALED[dtype], vanishing, search, *flat[1:], sums)
