"""Storage formats: how a 2-D weight lies on disk, whatever a dialect calls its parts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from requant.formats.base import FLOAT_DTYPES, NUMPY_BITS, Format, Part, Tile, ceil_div
from requant.formats.dense import Dense
from requant.formats.exact import EXACT_ROUTES, ExactRoute
from requant.formats.fp8 import Fp8Block, Fp8Channel
from requant.formats.mxfp4 import Mxfp4

FORMATS: Mapping[str, Format] = MappingProxyType({f.name: f for f in (Dense(), Fp8Channel(), Fp8Block(), Mxfp4())})

__all__ = [
    "EXACT_ROUTES",
    "FLOAT_DTYPES",
    "FORMATS",
    "NUMPY_BITS",
    "ExactRoute",
    "Format",
    "Part",
    "Tile",
    "ceil_div",
]
