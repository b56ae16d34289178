"""Exact transcodes: pairs of formats between which no value changes, and where that ends.

A microscaled value is e2m1 * 2^k, at most two significant bits; a target that holds it with a power-of-two
scale loses nothing as long as the values under one scale lie close enough together. A region (the values
under one target scale) in which they do not is *over-span*: it is rounded to nearest even with the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Tile


@dataclass(frozen=True, slots=True)
class ExactRoute:
    """How one format becomes another without decoding.

    ``transcode(source parts, target parts)`` returns how many values lie in over-span regions.
    ``suspects(scale bits)`` is a boolean array over the regions of a tile, a superset of the over-span ones
    found from the scales alone; ``over_span(source parts)`` counts the values exactly, without writing.
    The target's scales may be BF16 or F32: powers of two are the same in both.
    """

    transcode: Callable[[Sequence[Tile], Sequence[Tile]], int]
    suspects: Callable[[NDArray[Any]], NDArray[Any]]
    over_span: Callable[[Sequence[Tile]], int]


def _mxfp4_to_fp8(block: bool) -> ExactRoute:
    def transcode(source: Sequence[Tile], target: Sequence[Tile]) -> int:
        from requant.kernels import mxfp4

        kernel = mxfp4.to_fp8_block if block else mxfp4.to_fp8_channel
        scales = target[1]
        bf16 = scales.bits if scales.dtype == "BF16" else np.empty(scales.bits.shape, np.uint16)
        over_span = kernel(source[0].bits, source[1].bits, target[0].bits, bf16)
        if scales.dtype == "F32":
            np.left_shift(bf16, 16, out=scales.bits, dtype=np.uint32)  # BF16 is the upper half of an F32
        return over_span

    def suspects(exponents: NDArray[Any]) -> NDArray[Any]:
        from requant.kernels import mxfp4

        return mxfp4.suspects(exponents, block)

    def over_span(source: Sequence[Tile]) -> int:
        from requant.kernels import mxfp4

        return mxfp4.over_span(source[0].bits, source[1].bits, block)

    return ExactRoute(transcode, suspects, over_span)


EXACT_ROUTES: Mapping[tuple[str, str], ExactRoute] = MappingProxyType(
    {
        ("mxfp4", "fp8-block"): _mxfp4_to_fp8(block=True),
        ("mxfp4", "fp8-channel"): _mxfp4_to_fp8(block=False),
    }
)
"""(source format, target format) → the exact route between them."""
