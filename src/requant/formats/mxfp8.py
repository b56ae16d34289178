"""MXFP8: E4M3 codes, one E8M0 exponent per 32 columns: W = e4m3 * 2^(byte - 127)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from requant.formats.base import Encoding, Part, ScaleRule, Tile

if TYPE_CHECKING:
    from requant.formats.grid import Grid

GROUP = 32


class Mxfp8:
    """Codes ``[out, in]``, exponents ``[out, in/32]``, U8."""

    name = "mxfp8"
    packing = 1
    multiple = GROUP
    pools_amax = False
    scale_rules: tuple[ScaleRule, ...] = ("mse", "pow2")

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the codes and the exponents; ``in`` must be a multiple of 32."""
        rows, columns = shape
        return Part("F8_E4M3", shape, 1, "F8_E4M3"), Part("U8", (rows, columns // GROUP), 1, "F8_E8M0")

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Expand to ``out.dtype``; exact in F32 for exponent bytes up to 246, in BF16 for 3 to 246."""
        from requant.kernels import mxfp8

        codes, exponents = parts
        mxfp8.decode(codes.bits, exponents.bits, out.bits, out.dtype)

    def grid(self, parts: Sequence[Tile], dtype: str) -> Grid:
        """Return the E4M3 values times each group's power of two."""
        from requant.formats.grid import microscaled

        return microscaled(448, 4, 2.0**-10, (1, GROUP), parts[1], dtype)

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Take the exponent from each group's largest magnitude, or search around it (mse); round to nearest even."""
        from requant.kernels import mxfp8

        codes, exponents = parts
        search = how.scale == "mse"
        return mxfp8.encode(weight.bits, weight.dtype, how.reference, codes.bits, exponents.bits, search, how.errors)
