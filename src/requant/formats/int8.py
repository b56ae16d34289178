"""INT8 codes with one scale per output channel: W = code * scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from requant.formats.base import Encoding, Part, ScaleRule, Tile

if TYPE_CHECKING:
    from requant.formats.grid import Grid


class Int8Channel:
    """compressed-tensors' ``int-quantized``: codes I8 ``[out, in]``, scales ``[out, 1]``."""

    name = "int8-channel"
    packing = 1
    multiple = 1
    pools_amax = False
    scale_rules: tuple[ScaleRule, ...] = ("mse",)

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the codes and one scale of ``dtype`` per row."""
        return Part("I8", shape, 1, "I8"), Part(dtype, (shape[0], 1), 1, dtype)

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Multiply every code by its row's scale."""
        from requant.kernels import ints

        codes, scales = parts
        ints.decode(codes.bits, scales.bits, scales.dtype, ints.INT8, out.bits, out.dtype)

    def grid(self, parts: Sequence[Tile], dtype: str) -> Grid:
        """Return the integers times each row's scale."""
        from requant.formats.grid import integers

        return integers(8, 0, parts[1], None, dtype)

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Scale every row so that its largest magnitude becomes 127.5, or as ``how.scale`` says."""
        from requant.kernels import ints

        codes, scales = (part.bits for part in parts)
        search = how.scale == "mse"
        return ints.encode(
            weight.bits, weight.dtype, how.reference, ints.INT8, codes, scales, search=search, errors=how.errors
        )
