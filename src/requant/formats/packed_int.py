"""Integers of 4 or 8 bits packed into words, compressed-tensors' ``pack-quantized``: W = (code - zero) * scale."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Encoding, Part, ScaleRule, Tile, ceil_div

if TYPE_CHECKING:
    from requant.formats.grid import Grid

WORD = 32
CHANNEL = -1
"""The ``group`` of a format with one scale per row."""

_NAME = re.compile(r"int([48])-(?:g([1-9][0-9]*)|channel)(-asym)?(-packed)?")


@dataclass(frozen=True, slots=True)
class PackedInt:
    """Codes of ``bits`` bits plus 2^(bits-1) in I32 words, the first column lowest; a scale per ``group`` columns.

    Arrays: words ``[out, ceil(in * bits / 32)]``, unused bits zero; scales ``[out, in / group]``; unless
    ``symmetric``, zero points packed as the codes are, but along the rows, ``[ceil(out * bits / 32), in / group]``;
    the weight's shape, I64 ``[2]``. ``group`` -1: one scale (and zero point) per row.
    """

    bits: Literal[4, 8]
    group: int
    symmetric: bool = True

    pools_amax = False
    scale_rules: ClassVar[tuple[ScaleRule, ...]] = ("mse",)

    @staticmethod
    def named(name: str) -> PackedInt | None:
        """Return the format called ``name``, such as int4-g128, int8-g32-asym or int4-channel; None if none is."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        bits, group, asymmetric, _ = found.groups()
        kind = PackedInt(8 if bits == "8" else 4, int(group or CHANNEL), not asymmetric)
        return kind if kind.name == name else None

    @property
    def name(self) -> str:
        """The registry's key; int8-channel is the name of the codes that are not packed."""
        region = "channel" if self.group == CHANNEL else f"g{self.group}"
        name = f"int{self.bits}-{region}{'' if self.symmetric else '-asym'}"
        return f"{name}-packed" if name == "int8-channel" else name

    @property
    def packing(self) -> int:
        """Codes per word."""
        return WORD // self.bits

    @property
    def multiple(self) -> int:
        """The group, or 1: a last word may be filled in part."""
        return max(1, self.group)

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return words, scales of ``dtype``, zero points unless symmetric, and the shape."""
        rows, columns = shape
        groups = 1 if self.group == CHANNEL else columns // self.group
        words = Part("I32", (rows, ceil_div(columns, self.packing)), 1, "I32")
        zeros = Part("I32", (ceil_div(rows, self.packing), groups), self.packing, "I32")
        scales = Part(dtype, (rows, groups), 1, dtype)
        return (words, scales, *(() if self.symmetric else (zeros,)), Part("I64", (2,), 0, "I64"))

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Multiply every code, less its zero point, by its group's scale."""
        from requant.kernels import ints

        words, scales = parts[:2]
        zeros = None if self.symmetric else parts[2].bits
        ints.decode(words.bits, scales.bits, scales.dtype, ints.PACKED[self.bits], out.bits, out.dtype, zeros)

    def grid(self, parts: Sequence[Tile], dtype: str) -> Grid:
        """Return the integers, less their zero point, times each group's scale."""
        from requant.formats.grid import integers

        scales = parts[1]
        zeros = None if self.symmetric else self._zeros(parts[2], scales.bits.shape[0])
        return integers(self.bits, max(0, self.group), scales, zeros, dtype)

    def _zeros(self, words: Tile, rows: int) -> NDArray[np.float32]:
        """Return the zero points of a tile's rows, -2^(bits-1) to 2^(bits-1) - 1."""
        shifts = np.arange(0, WORD, self.bits, dtype=np.uint32)[:, None]
        codes = (words.bits[:, None, :] >> shifts) & np.uint32(2**self.bits - 1)
        zeros: NDArray[np.float32] = codes.reshape(-1, words.bits.shape[1])[:rows].astype(np.float32)
        return zeros - np.float32(2 ** (self.bits - 1))

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Scale every group so that its values fill the codes, or as ``how.scale`` says."""
        from requant.kernels import ints

        words, scales = parts[0].bits, parts[1].bits
        zeros = None if self.symmetric else parts[2].bits
        search = how.scale == "mse"
        kind = ints.PACKED[self.bits]
        return ints.encode(
            weight.bits, weight.dtype, how.reference, kind, words, scales, zeros, search=search, errors=how.errors
        )
