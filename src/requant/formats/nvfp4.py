"""NVFP4: two E2M1 codes a byte, one E4M3 scale per 16 columns, one F32 scale per weight or fused group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from requant.formats.base import Encoding, Part, ScaleRule, Tile

if TYPE_CHECKING:
    from requant.formats.grid import Grid

GROUP = 16


class Nvfp4:
    """Codes ``[out, in/2]`` (low nibble: even column), block scales ``[out, in/16]``, and one float.

    With ``divides`` the float is compressed-tensors' ``weight_global_scale``, a divisor: W = e2m1 * (s / G);
    otherwise ModelOpt's ``weight_scale_2``, a multiplier: W = e2m1 * (s * scale_2). Either follows from the amax
    of the fused group and is the same for all its members.
    """

    packing = 2
    multiple = GROUP
    pools_amax = True
    scale_rules: tuple[ScaleRule, ...] = ("mse",)

    def __init__(self, *, divides: bool):
        self.divides = divides
        self.name = "nvfp4" if divides else "nvfp4-scale2"

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the codes, the block scales and the float; ``in`` must be a multiple of 16."""
        rows, columns = shape
        return (
            Part("U8", (rows, columns // 2), 1, "F4"),
            Part("F8_E4M3", (rows, columns // GROUP), 1, "F8_E4M3"),
            Part("F32", (1,), 0, "F32"),
        )

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Multiply every code by its group's scale, as the scheme's own decoder rounds it."""
        from requant.kernels import nvfp4

        packed, scales, whole = parts
        scale = float(whole.bits.view(np.float32).item())
        nvfp4.decode(packed.bits, scales.bits, scale, self.divides, out.bits, out.dtype)

    def grid(self, parts: Sequence[Tile], dtype: str) -> Grid:
        """Return the E2M1 values times each block's scale."""
        from requant.formats.grid import nvfp4

        whole = parts[2].bits.view(np.float32).reshape(())
        blocks = parts[1].bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            unit = 1 / whole if self.divides else whole
            return nvfp4(GROUP, blocks / whole if self.divides else blocks * whole, float(unit))

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Scale the group's amax to 6 * 448 and each block's to 6; ``how.amax`` is that of the fused group."""
        from requant.kernels import nvfp4

        packed, scales, whole = parts
        if self.divides:
            scale, rounding = nvfp4.divisor(how.amax, weight.dtype if how.reference else "F32")
        else:
            scale, rounding = nvfp4.multiplier(how.amax), "F32"
        whole.bits.view(np.float32)[:] = scale
        search = how.scale == "mse"
        bits, dtype, divides = weight.bits, weight.dtype, self.divides
        return nvfp4.encode(
            bits, dtype, rounding, scale, divides, search, packed.bits, scales.bits, how.errors if search else None
        )

    def replaces_reference(self, amax: float, dtype: str) -> bool:
        """Tell whether a group of this amax is encoded in float32 although the reference was asked for.

        compressed-tensors' global scale overflows in ``dtype`` (F16: from amax 0.041 down) and becomes 1, with
        which small weights all become zero.
        """
        from requant.kernels import nvfp4

        return self.divides and amax > 0 and not np.isfinite(nvfp4.reference_divisor(amax, dtype))
