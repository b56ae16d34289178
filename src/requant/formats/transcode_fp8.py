"""Exact transcodes from FP8: the codes stay, a scale is given to everything that lies under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from requant.formats.base import Tile
from requant.formats.exact import ExactRoute, lossless, none_odd
from requant.formats.fp8 import BLOCK
from requant.formats.mxfp8 import GROUP
from requant.formats.powers import exponents_of, pool_of_powers, wide

_E8M0_RANGE = 127


def _broadcast(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
    """Copy the codes, repeat the scale; the target's is of the same dtype, or F32."""
    target[0].bits[:] = source[0].bits
    scale = source[1] if source[1].dtype == target[1].dtype else wide(source[1])
    target[1].bits[:] = scale.bits.reshape(())
    return 0


def _to_mxfp8(block: bool) -> ExactRoute:
    """Powers of two in E8M0's range become the exponents of their groups; a weight with another does not qualify."""

    def transcode(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
        codes, exponents = target
        np.copyto(codes.bits, source[0].bits)
        regions = (exponents_of(source[1]) + 127).astype(np.uint8)
        if block:
            rows, groups = exponents.bits.shape
            regions = regions.repeat(BLOCK // GROUP, axis=1)[:, :groups].repeat(BLOCK, axis=0)[:rows]
        np.copyto(exponents.bits, regions)
        return 0

    return lossless(transcode, pool_of_powers(_E8M0_RANGE), none_odd)


FROM_FP8: Mapping[tuple[str, str], ExactRoute] = MappingProxyType(
    {
        ("fp8-tensor", "fp8-channel"): lossless(_broadcast),
        ("fp8-tensor", "fp8-block"): lossless(_broadcast),
        ("fp8-block", "mxfp8"): _to_mxfp8(block=True),
        ("fp8-channel", "mxfp8"): _to_mxfp8(block=False),
    }
)
"""(FP8 format, target format) → the exact route."""
