"""fp8, DeepSeek's: blocks with a ``weight_scale_inv``, which multiplies despite its name."""

from __future__ import annotations

from types import MappingProxyType

from requant.dialects.base import Dialect, Spelling

FP8 = Dialect(
    "fp8",
    MappingProxyType(
        {
            "dense": (Spelling("weight"),),
            "fp8-block": (Spelling("weight"), Spelling("weight_scale_inv", ("F8_E8M0",))),
        }
    ),
    scale_dtype="F32",
)
