"""FP8 E4M3 codes with one scale per output channel, per 128x128 block or per tensor: W = code * scale.

Scales are stored in the dtype of the tile that they are written to. ModelOpt (0.47) writes F32 scales, f32(amax / 448).
Its FP8 per tensor is the reference arithmetic with such a scale: ``code = e4m3(rnd(w / scale))`` with rnd() to the
weight's dtype, since a scale without dimensions does not promote the quotient. Its FP8 per channel and per block
(FP8_PB_WO) are the float32 arithmetic. Only zeros differ: ModelOpt gives a channel of zeros scale 1, and a tensor of
zeros scale 0 and NaN codes; here both have the eps of the scale's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from requant.formats.base import Encoding, Part, ScaleRule, Tile, ceil_div

if TYPE_CHECKING:
    from requant.formats.grid import Grid

BLOCK = 128


class Fp8Channel:
    """Codes ``[out, in]``, scales ``[out, 1]``."""

    name = "fp8-channel"
    packing = 1
    multiple = 1
    pools_amax = False
    scale_rules: tuple[ScaleRule, ...] = ("mse", "pow2")

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the codes and one scale of ``dtype`` per row."""
        return _codes(shape), Part(dtype, (shape[0], 1), 1, dtype)

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Multiply every code by its row's scale."""
        _decode(parts, (1, max(1, out.bits.shape[1])), out)

    def grid(self, parts: Sequence[Tile], dtype: str) -> Grid:
        """Return the E4M3 values times each row's scale."""
        from requant.formats.grid import e4m3

        return e4m3((1, 0), parts[1], dtype)

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Scale every row so that its largest magnitude becomes 448, or by ``how.scale``."""
        from requant.kernels import fp8

        if how.scale == "mse":
            return _search(weight, parts, (1, max(1, weight.bits.shape[1])), how)
        codes, scales = parts
        return fp8.encode_channel(
            weight.bits, weight.dtype, how.reference, codes.bits, scales.bits, scales.dtype, how.scale == "pow2"
        )


class Fp8Block:
    """Codes ``[out, in]``, scales ``[ceil(out/128), ceil(in/128)]``; edge blocks are smaller."""

    name = "fp8-block"
    packing = 1
    multiple = 1
    pools_amax = False
    scale_rules: tuple[ScaleRule, ...] = ("mse", "pow2")

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the codes and one scale of ``dtype`` per block."""
        blocks = ceil_div(shape[0], BLOCK), ceil_div(shape[1], BLOCK)
        return _codes(shape), Part(dtype, blocks, BLOCK, dtype)

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Multiply every code by its block's scale, a float or (DeepSeek) an E8M0 exponent."""
        _decode(parts, (BLOCK, BLOCK), out)

    def grid(self, parts: Sequence[Tile], dtype: str) -> Grid:
        """Return the E4M3 values times each block's scale."""
        from requant.formats.grid import e4m3

        return e4m3((BLOCK, BLOCK), parts[1], dtype)

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Scale every block so that its largest magnitude becomes 448, or by ``how.scale``."""
        from requant.kernels import fp8

        if how.scale == "mse":
            return _search(weight, parts, (BLOCK, BLOCK), how)
        codes, scales = parts
        return fp8.encode_block(
            weight.bits, weight.dtype, how.reference, codes.bits, scales.bits, scales.dtype, how.scale == "pow2"
        )


class Fp8Tensor:
    """Codes ``[out, in]``, one scale ``[1]``."""

    name = "fp8-tensor"
    packing = 1
    multiple = 1
    pools_amax = True
    scale_rules: tuple[ScaleRule, ...] = ("pow2",)

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the codes and a single scale of ``dtype``."""
        return _codes(shape), Part(dtype, (1,), 0, dtype)

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Multiply every code by the scale."""
        codes, scale = parts
        rows, columns = out.bits.shape
        _decode((codes, scale._replace(bits=scale.bits.reshape(1, 1))), (max(1, rows), max(1, columns)), out)

    def grid(self, parts: Sequence[Tile], dtype: str) -> Grid:
        """Return the E4M3 values times the scale."""
        from requant.formats.grid import e4m3

        return e4m3((0, 0), Tile(parts[1].bits.reshape(1, 1), parts[1].dtype), dtype)

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Scale so that ``how.amax`` becomes 448; no tile can search for a better scale ("mse")."""
        from requant.kernels import fp8

        codes, scale = parts
        return fp8.encode_tensor(
            weight.bits,
            weight.dtype,
            how.reference,
            how.amax,
            codes.bits,
            scale.bits.reshape(1),
            scale.dtype,
            how.scale == "pow2",
        )


def _codes(shape: tuple[int, int]) -> Part:
    return Part("F8_E4M3", shape, 1, "F8_E4M3")


def _decode(parts: Sequence[Tile], block: tuple[int, int], out: Tile) -> None:
    from requant.kernels import fp8

    codes, scales = parts
    fp8.decode(codes.bits, scales.bits, scales.dtype, block, out.bits, out.dtype)


def _search(weight: Tile, parts: Sequence[Tile], block: tuple[int, int], how: Encoding) -> int:
    from requant.kernels import fp8_search

    codes, scales = parts
    return fp8_search.encode(
        weight.bits, weight.dtype, how.reference, block, codes.bits, scales.bits, scales.dtype, how.errors
    )
