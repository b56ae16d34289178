"""FP8 E4M3 codes with one scale per output channel or per 128x128 block: W = code * scale."""

from __future__ import annotations

from collections.abc import Sequence

from requant.formats.base import Encoding, Part, Tile, ceil_div

BLOCK = 128


class Fp8Channel:
    """Codes ``[out, in]``, scales ``[out, 1]``."""

    name = "fp8-channel"
    packing = 1
    multiple = 1
    pools_amax = False

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the codes and one scale of ``dtype`` per row."""
        return _codes(shape), Part(dtype, (shape[0], 1), 1, dtype)

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Multiply every code by its row's scale."""
        _decode(parts, (1, max(1, out.bits.shape[1])), out)

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Scale every row so that its largest magnitude becomes 448."""
        from requant.kernels import fp8

        codes, scales = parts
        return fp8.encode_channel(weight.bits, weight.dtype, how.reference, codes.bits, scales.bits)


class Fp8Block:
    """Codes ``[out, in]``, scales ``[ceil(out/128), ceil(in/128)]``; edge blocks are smaller."""

    name = "fp8-block"
    packing = 1
    multiple = 1
    pools_amax = False

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the codes and one scale of ``dtype`` per block."""
        blocks = ceil_div(shape[0], BLOCK), ceil_div(shape[1], BLOCK)
        return _codes(shape), Part(dtype, blocks, BLOCK, dtype)

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Multiply every code by its block's scale."""
        _decode(parts, (BLOCK, BLOCK), out)

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Scale every block so that its largest magnitude becomes 448."""
        from requant.kernels import fp8

        codes, scales = parts
        return fp8.encode_block(weight.bits, weight.dtype, how.reference, codes.bits, scales.bits)


def _codes(shape: tuple[int, int]) -> Part:
    return Part("F8_E4M3", shape, 1, "F8_E4M3")


def _decode(parts: Sequence[Tile], block: tuple[int, int], out: Tile) -> None:
    from requant.kernels import fp8

    codes, scales = parts
    fp8.decode(codes.bits, scales.bits, scales.dtype, block, out.bits, out.dtype)
