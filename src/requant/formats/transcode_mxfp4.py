"""Exact transcodes from MXFP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Tile
from requant.formats.exact import ExactRoute


def _to_fp8(block: bool) -> ExactRoute:
    def transcode(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
        from requant.kernels import mxfp4

        kernel = mxfp4.to_fp8_block if block else mxfp4.to_fp8_channel
        scales = target[1]
        bf16 = scales.bits if scales.dtype == "BF16" else np.empty(scales.bits.shape, np.uint16)
        over_span = kernel(source[0].bits, source[1].bits, target[0].bits, bf16)
        if scales.dtype == "F32":
            np.left_shift(bf16, 16, out=scales.bits, dtype=np.uint32)  # BF16 is the upper half of an F32
        return over_span

    def suspects(scales: Sequence[Tile], _pooled: float) -> NDArray[np.bool_]:
        from requant.kernels import mxfp4

        return mxfp4.suspects(scales[0].bits, block)

    def over_span(source: Sequence[Tile], _pooled: float) -> int:
        from requant.kernels import mxfp4

        return mxfp4.over_span(source[0].bits, source[1].bits, block)

    return ExactRoute(transcode, suspects, over_span)


FROM_MXFP4: Mapping[str, ExactRoute] = MappingProxyType(
    {
        "fp8-block": _to_fp8(block=True),
        "fp8-channel": _to_fp8(block=False),
    }
)
"""Target format → the exact route to it."""
