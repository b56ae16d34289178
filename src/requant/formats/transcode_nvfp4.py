"""Exact transcodes from NVFP4: between its two global scales, and to unquantized weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Format, Tile
from requant.formats.exact import ExactRoute, lossless, none_odd
from requant.formats.nvfp4 import Nvfp4
from requant.formats.powers import pool_of_powers


def _invert(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
    """Copy codes and block scales and write the reciprocal of the global scale; count what is no power of two.

    Another global scale comes back as it was, or one unit in its last place away: 6e-8 of every value.
    """
    for part, copy in zip(source[:2], target[:2], strict=True):
        np.copyto(copy.bits, part.bits)
    with np.errstate(divide="ignore", over="ignore"):
        np.divide(np.float32(1), source[2].bits.view(np.float32), out=target[2].bits.view(np.float32))
    return _inexact(source, 0.0)


def _to_divisor(source: Sequence[Tile], target: Sequence[Tile], pooled: float) -> int:
    """Invert a multiplier; one so small that its reciprocal is Inf, ModelOpt's 0 above all, leaves only zeros."""
    inexact = _invert(source, target, pooled)
    divisor = target[2].bits.view(np.float32)
    if np.isinf(divisor).any():
        codes = target[0].bits
        codes &= np.uint8(0x88)
        divisor[:] = 1
    return inexact


def _inexact(source: Sequence[Tile], _pooled: float) -> int:
    return 0 if _inverts(source[2]) else source[0].bits.size * 2


def _suspects(scales: Sequence[Tile], _pooled: float) -> NDArray[np.bool_]:
    return np.array([[not _inverts(scales[1])]])


def _inverts(scale: Tile) -> bool:
    """Tell whether a global scale is a power of two, from 2^-127 on, whose reciprocal is one, too."""
    mantissa, exponent = np.frexp(scale.bits.view(np.float32).item())
    return bool(mantissa == 0.5 and exponent > -127)


FROM_NVFP4: Mapping[tuple[str, str], ExactRoute] = MappingProxyType(
    {
        ("nvfp4", "nvfp4-scale2"): ExactRoute(_invert, _suspects, _inexact),
        ("nvfp4-scale2", "nvfp4"): ExactRoute(_to_divisor, _suspects, _inexact),
    }
)
"""(NVFP4, target format) → the exact route to it."""

# e2m1 * e4m3 has six significant bits, from 2^-10 to 6 * 448; a power of two within these leaves them BF16's and F32's.
_LARGEST_POWER = 115


def _to_dense(format_: Format) -> ExactRoute:
    def transcode(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
        format_.decode(source, target[0])
        return 0

    powers = pool_of_powers(_LARGEST_POWER, part=1)
    return lossless(transcode, powers, none_odd)


NVFP4_TO_DENSE: Mapping[tuple[str, str], ExactRoute] = MappingProxyType(
    {(f.name, dtype): _to_dense(f) for f in (Nvfp4(divides=True), Nvfp4(divides=False)) for dtype in ("BF16", "F32")}
)
"""(NVFP4, dtype of the unquantized weight) → the exact route, for weights whose global scale is a power of two."""
