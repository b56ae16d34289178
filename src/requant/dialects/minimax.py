"""MiniMax-M3 and Ling-3.0: microscaled weights whose exponents are called ``weight_scale_inv``, and multiply."""

from __future__ import annotations

from types import MappingProxyType

from requant.dialects.base import Dialect, Spelling

_EXPONENTS = Spelling("weight_scale_inv", ("F8_E8M0",))

MINIMAX = Dialect(
    "minimax",
    MappingProxyType({"mxfp8": (Spelling("weight"), _EXPONENTS), "mxfp4": (Spelling("weight", ("I8",)), _EXPONENTS)}),
)
