"""NVFP4: FP4 E2M1 codes, one E4M3 scale per 16 columns, one float scale per weight (or fused group of weights).

compressed-tensors stores that float as a divisor G: ``W = e2m1 * (s / G)``; ModelOpt as a multiplier, scale_2:
``W = e2m1 * (s * scale_2)``. Groups never straddle rows, so a tile is handled as one flat run of groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .floats import FLOATS, f32
from .native import Kernel

GROUP = 16
E2M1_MAX, E4M3_MAX = f32(6), f32(448)
_encode = Kernel("nvfp4", "encode")
_decode = Kernel("nvfp4", "decode")
_first_nonfinite = Kernel("floats", "first_nonfinite")
# The largest G whose reciprocal every engine can represent; for weights so small that 2688 / amax overflows.
_LARGEST_DIVISOR = f32(2.0**126)
# Beyond, float32 may not have a scale's inverse: the scale of amax stays.
_LARGEST_SEARCHED = 2.0**100


class Global(NamedTuple):
    """The float scale of a weight: a divisor, or a multiplier."""

    value: np.float32
    divides: np.bool_


def reference_divisor(amax: float, dtype: str) -> float:
    """Return compressed-tensors' G, ``rnd(rnd(1 / amax) * 2688)`` in ``dtype``, or inf where that overflows."""
    rounded = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[dtype]
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = rounded(f32(1) / f32(amax)).astype(np.float32)
        return float(rounded(reciprocal * (E2M1_MAX * E4M3_MAX)))


def divisor(amax: float, dtype: str) -> tuple[float, str]:
    """Return G for a weight or fused group of this amax, and the dtype in whose arithmetic to encode it.

    compressed-tensors replaces a G that overflows in ``dtype`` by 1, and loses the weight; here it is then computed
    in float32, and is at most 2^126. Zeros, and what has no finite amax, have G = 1.
    """
    if not 0 < amax < np.inf:
        return 1.0, dtype
    g = reference_divisor(amax, dtype)
    if np.isfinite(g):
        return g, dtype
    return min(reference_divisor(amax, "F32"), float(_LARGEST_DIVISOR)), "F32"


def multiplier(amax: float) -> float:
    """Return ModelOpt's scale_2, ``amax / 2688`` in float32, but at least its smallest normal; 1 for zeros."""
    if not 0 < amax < np.inf:
        return 1.0
    return float(max(f32(amax) / (E2M1_MAX * E4M3_MAX), np.finfo(np.float32).tiny))


def encode(
    w: NDArray[Any],
    dtype: str,
    rounding: str,
    global_scale: float,
    divides: bool,
    search: bool,
    packed: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    errors: NDArray[np.float64] | None,
) -> int:
    """Encode a tile of bits of ``dtype`` [rows, cols], cols % 16 = 0, whose float scale is given.

    If that ``divides`` (compressed-tensors), ``s = e4m3(G * rnd(amax / 6))`` with rnd() to ``rounding``, 0.125 for
    zero, and codes are those of ``w / (s / G)`` in float32. Otherwise (ModelOpt, without roundings to ``dtype``)
    ``s = e4m3(amax / (6 * scale_2))``, at least 2^-9, 1 for a group of zeros, and codes are those of
    ``w / (s * scale_2)``. Codes are rounded to nearest even; what is negative and rounds to zero keeps its sign.

    ``search``: of the scales from one E4M3 code below that to five above, take the one with the least squared error
    of its group; to ``errors``, float64 [2] if given, are added the sums for the first scales and for those taken.
    There is no search where the float scale is beyond 2^100 either way.

    Written: ``packed`` [rows, cols / 2], even column in the low nibble, and ``scales`` E4M3 [rows, cols / 16].

    Returns the flat index of the first NaN or infinity (the outputs are then meaningless), or -1.
    """
    flat = w.reshape(-1)
    scale = Global(f32(global_scale), np.bool_(divides))
    words = flat.view(np.uint32)
    search = search and 1 / _LARGEST_SEARCHED < global_scale < _LARGEST_SEARCHED
    sums = np.zeros(2) if errors is None else errors
    flat_packed, flat_scales = packed.reshape(-1), scales.reshape(-1)
    chunk = _encode(words, FLOATS[dtype], FLOATS[rounding], scale, search, flat_packed, flat_scales, sums)
    if chunk < 0:
        return -1
    start = chunk * GROUP
    return start + _first_nonfinite(flat[start:], FLOATS[dtype])


def decode(
    packed: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    global_scale: float,
    divides: bool,
    out: NDArray[Any],
    out_dtype: str,
) -> None:
    """Write the values of ``packed`` [rows, cols / 2] and ``scales`` [rows, cols / 16] to ``out`` [rows, cols].

    ``global_scale`` is compressed-tensors' G if it ``divides``, else ModelOpt's scale_2. The group's scale, and its
    product with a code, are each rounded to float32: the stored values, for F32. compressed-tensors decodes to
    BF16, whatever is made of that afterwards: its F16 is rounded twice. ModelOpt's is not.
    """
    scale = Global(f32(global_scale), np.bool_(divides))
    through = "BF16" if divides and out_dtype == "F16" else out_dtype
    _decode(packed.reshape(-1), scales.reshape(-1), scale, FLOATS[through], out.reshape(-1), FLOATS[out_dtype])
