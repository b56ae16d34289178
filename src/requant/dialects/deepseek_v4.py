"""DeepSeek-V4: scales called ``scale``, E8M0 throughout; FP4 experts are MXFP4 whose codes are labelled I8."""

from __future__ import annotations

from types import MappingProxyType

from requant.dialects.base import Dialect, Spelling

_EXPONENTS = Spelling("scale", ("F8_E8M0",))

DEEPSEEK_V4 = Dialect(
    "deepseek-v4",
    MappingProxyType(
        {"mxfp4": (Spelling("weight", ("I8",)), _EXPONENTS), "fp8-block": (Spelling("weight"), _EXPONENTS)}
    ),
)
