"""What a storage format is: logical parts, a decoder and an encoder over tiles of whole rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from requant.formats.grid import Grid

FLOAT_DTYPES = ("BF16", "F16", "F32")
"""The dtypes in which a weight may be stored unquantized, and in which a scale may be kept."""

NUMPY_BITS: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.uint16),
    "F32": np.dtype(np.uint32),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "I32": np.dtype(np.uint32),
    "I64": np.dtype(np.uint64),
}
"""safetensors dtype → the unsigned integer in which its bit patterns are handled."""

ScaleRule = Literal["amax", "mse", "pow2"]
"""How a scale is found: from the largest magnitude, by a search for the least squared error, or as a power of two."""


class Part(NamedTuple):
    """One stored array of a weight.

    ``dtype`` is what the file calls it, ``spells`` what its bits are: E8M0 exponents are stored as U8.
    ``rows`` weight rows share one row of it, so a tile of weight rows [a, b) needs its rows
    [a // rows, ceil(b / rows)). A part that belongs to the weight as a whole (a global scale, a shape) has
    ``rows`` 0 and one dimension; every tile takes all of it, as one row.
    """

    dtype: str
    shape: tuple[int, ...]
    rows: int
    spells: str

    @property
    def is_shape(self) -> bool:
        """Whether it is the weight's logical shape, to be written by who allocates the parts."""
        return self.spells == "I64"

    def spelled(self, stored: str) -> str:
        """Return what the bits are of this part stored as dtype ``stored``, which readers may take in its place."""
        return self.spells if stored == self.dtype else stored


class Tile(NamedTuple):
    """The bit patterns of some rows of a part: unsigned integers, C-contiguous, and the dtype they spell."""

    bits: NDArray[Any]
    dtype: str


class Encoding(NamedTuple):
    """How a weight is encoded, beyond what its format fixes.

    ``reference``: LLM Compressor's arithmetic in the weight's dtype, otherwise float32. ``amax``: the largest
    magnitude of the weight, or of the fused group that shares its scale; only formats that pool it read it.
    ``errors``: float64 [2], to which a search for scales (mse) adds the summed squared errors of the amax scales and
    of those it chose.
    """

    reference: bool
    scale: ScaleRule = "amax"
    amax: float = 0.0
    errors: NDArray[np.float64] | None = None


class Format(Protocol):
    """How a 2-D weight lies on disk. The first part is the payload, the others its scales."""

    @property
    def name(self) -> str:
        """The registry's key."""
        ...

    @property
    def packing(self) -> int:
        """Columns of the weight per column of the payload."""
        ...

    @property
    def multiple(self) -> int:
        """What the weight's columns must be a multiple of."""
        ...

    @property
    def scale_rules(self) -> tuple[ScaleRule, ...]:
        """The rules beside amax that `encode` follows; another leaves it with amax."""
        ...

    @property
    def pools_amax(self) -> bool:
        """Whether one scale covers more than a tile, so that `encode` needs ``how.amax``."""
        ...

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the arrays that store a weight ``[out, in]`` with scales of ``dtype`` (one of FLOAT_DTYPES)."""
        ...

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Write the values of a tile of rows as bits of ``out.dtype``; F32 gives the stored values exactly."""
        ...

    def grid(self, parts: Sequence[Tile], dtype: str) -> Grid:
        """Return what a tile's codes can stand for, and how far a weight of ``dtype`` may have been from them."""
        ...

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Encode a tile that starts at a multiple of 128 rows; return a flat index, or -1.

        The index is that of the first NaN, Inf, or value too large for the format. A part that `Part.is_shape` is
        left alone: a tile does not know the weight's.
        """
        ...


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)
