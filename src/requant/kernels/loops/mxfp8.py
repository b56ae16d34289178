"""MXFP8: see `requant.kernels.mxfp8`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from requant.kernels.mx import GROUP
from requant.kernels.mxfp8 import BLOCK

from .jit import kernel

_MAGNITUDES = np.uint64(0x7F7F7F7F7F7F7F7F)


@kernel
def decode(codes: Any, exponents: Any, decoded: Any, out: Any) -> None:
    """Look up every code of flat arrays in ``decoded`` [exponent, code]."""
    for g in range(exponents.size):
        row = decoded[exponents[g]]
        for i in range(g * GROUP, g * GROUP + GROUP):
            out[i] = row[codes[i]]


# MXFP4 to MXFP8: [j, byte] the E4M3 codes of e2m1 * 2^j, two a word; all are exact.
_PAIRS = np.arange(256, dtype=np.uint8)[:, None] >> np.array([0, 4], np.uint8) & np.uint8(15)
_RAISED = (
    (_PAIRS.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.float32(2) ** np.arange(7)[:, None, None])
    .astype(ml_dtypes.float8_e4m3fn)
    .view(np.uint16)[..., 0]
)


@kernel
def from_mxfp4(packed: Any, exponents: Any, pairs: Any, lowered: Any) -> None:
    """Encode flat arrays; ``pairs`` are two codes a word."""
    for g in range(exponents.size):
        by = min(exponents[g], np.uint8(6))
        lowered[g] = exponents[g] - by
        row = _RAISED[by]
        for i in range(g * GROUP // 2, g * GROUP // 2 + GROUP // 2):
            pairs[i] = row[packed[i]]


@kernel
def block_exponents(words: Any, exponents: Any, least: Any, largest: Any) -> None:
    """``words``: the codes as uint64 [rows, groups, 4]."""
    for r in range(exponents.shape[0]):
        for g in range(exponents.shape[1]):
            group = words[r, g]
            if (group[0] | group[1] | group[2] | group[3]) & _MAGNITUDES:
                low, high, b = least[r // BLOCK], largest[r // BLOCK], g // (BLOCK // GROUP)
                low[b] = min(low[b], exponents[r, g])
                high[b] = max(high[b], exponents[r, g])
