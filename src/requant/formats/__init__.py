"""Storage formats: how a 2-D weight lies on disk, whatever a dialect calls its parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from requant.formats.base import FLOAT_DTYPES, NUMPY_BITS, Encoding, Format, Part, ScaleRule, Tile, ceil_div
from requant.formats.dense import Dense
from requant.formats.exact import ExactRoute, Pool, same_format
from requant.formats.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from requant.formats.int8 import Int8Channel
from requant.formats.mxfp4 import Mxfp4
from requant.formats.mxfp8 import Mxfp8
from requant.formats.nvfp4 import Nvfp4
from requant.formats.packed_int import PackedInt
from requant.formats.transcode_dense import FP8_AND_MX_TO_DENSE
from requant.formats.transcode_fp8 import FROM_FP8
from requant.formats.transcode_mxfp4 import FROM_MXFP4
from requant.formats.transcode_mxfp8 import FROM_MXFP8
from requant.formats.transcode_nvfp4 import FROM_NVFP4, NVFP4_TO_DENSE

_FORMATS: tuple[Format, ...] = (
    Dense(),
    Fp8Block(),
    Fp8Channel(),
    Fp8Tensor(),
    Int8Channel(),
    Mxfp4(),
    Mxfp8(),
    Nvfp4(divides=True),
    Nvfp4(divides=False),
)

FORMATS: Mapping[str, Format] = MappingProxyType({format_.name: format_ for format_ in _FORMATS})
"""Name → format; grouped integers, of which there are many, are made by `format_named`."""

EXACT_ROUTES: Mapping[tuple[str, str], ExactRoute] = MappingProxyType(
    {**FROM_FP8, **FROM_MXFP4, **FROM_MXFP8, **FROM_NVFP4}
)
"""(source format, target format) → the exact route between them; those to unquantized weights are in `TO_DENSE`."""

TO_DENSE: Mapping[tuple[str, str], ExactRoute] = MappingProxyType({**FP8_AND_MX_TO_DENSE, **NVFP4_TO_DENSE})
"""(source format, dtype of the unquantized weight) → the exact route between them."""


@lru_cache(maxsize=256)
def format_named(name: str) -> Format:
    """Return the format of that name; KeyError where there is none."""
    return FORMATS.get(name) or PackedInt.named(name) or FORMATS[name]


__all__ = [
    "EXACT_ROUTES",
    "FLOAT_DTYPES",
    "FORMATS",
    "NUMPY_BITS",
    "TO_DENSE",
    "Encoding",
    "ExactRoute",
    "Format",
    "PackedInt",
    "Part",
    "Pool",
    "ScaleRule",
    "Tile",
    "ceil_div",
    "format_named",
    "same_format",
]
