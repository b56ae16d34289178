"""MXFP4: two E2M1 codes a byte, one E8M0 exponent per 32 columns: W = e2m1 * 2^(byte - 127)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from requant.formats.base import Encoding, Part, ScaleRule, Tile

if TYPE_CHECKING:
    from requant.formats.grid import Grid

GROUP = 32


class Mxfp4:
    """Codes ``[out, in/2]`` (low nibble: even column), exponents ``[out, in/32]``, both U8."""

    name = "mxfp4"
    packing = 2
    multiple = GROUP
    pools_amax = False
    scale_rules: tuple[ScaleRule, ...] = ("mse", "pow2")

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the codes and the exponents; ``in`` must be a multiple of 32."""
        rows, columns = shape
        return Part("U8", (rows, columns // 2), 1, "F4"), Part("U8", (rows, columns // GROUP), 1, "F8_E8M0")

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Expand to ``out.dtype``; exact in BF16 and F32 for exponent bytes up to 252."""
        from requant.kernels import mxfp4

        packed, exponents = parts
        mxfp4.decode(packed.bits, exponents.bits, out.bits, out.dtype)

    def grid(self, parts: Sequence[Tile], dtype: str) -> Grid:
        """Return the E2M1 values times each group's power of two."""
        from requant.formats.grid import microscaled

        return microscaled(6, 2, 2.0**-2, (1, GROUP), parts[1], dtype)

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Take the exponent from each group's largest magnitude, or search around it (mse); round to nearest even."""
        from requant.kernels import mxfp4

        packed, exponents = parts
        search = how.scale == "mse"
        if not how.reference and weight.dtype == "F16":  # the rule in F16 loses groups of subnormals
            weight = Tile(weight.bits.view(np.float16).astype(np.float32).view(np.uint32), "F32")
        return mxfp4.encode(weight.bits, weight.dtype, packed.bits, exponents.bits, search, how.errors)
