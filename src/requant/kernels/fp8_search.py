"""FP8 scales by search: for each channel or block the scale of a grid under which the squared error is least.

E4M3's steps are relative, so it is a scale's significand that decides. Twice a scale that clips nothing is never
better: its values are among the other's. One that clips was the best for no channel and no block of normal,
Laplace and Student-t weights. That leaves one octave, from just below amax / 448 (448 stands for values up to 464).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .floats import FLOATS
from .fp8 import rounding_to
from .native import Kernel

_encode = Kernel("fp8_search", "encode")


class Room(NamedTuple):
    """Room for a region's magnitudes and their codes under the usual scale and the one found, each [values]."""

    magnitudes: NDArray[np.float32]
    usual: NDArray[np.uint8]
    found: NDArray[np.uint8]


def encode(
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    block: tuple[int, int],
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str,
    errors: NDArray[np.float64] | None,
) -> int:
    """Encode a tile with one scale per ``block`` (height, width); the tile starts at a block's first row.

    ``w``: bits of ``dtype`` [rows, cols]; written: ``codes`` E4M3 [rows, cols] and ``scales``, bits of ``scale_dtype``,
    one per block. A block's scale and codes are those of `fp8.encode_channel` and `fp8.encode_block`, or if that is
    better, the best scale that was found, rounded to ``scale_dtype``, and the codes nearest to ``w / scale`` whatever
    the arithmetic: rounded quotients would lose 0.05 dB again, a tenth to a third of what the search gains.

    ``errors`` [2], if given, gets added the sum of ``(w - code * scale)^2`` over all blocks without and with search.
    Returns the flat index of the first NaN or infinity in ``w`` (the outputs are then meaningless), or -1.
    """
    rounding = rounding_to(FLOATS[dtype if reference else "F32"])
    both = np.zeros(2) if errors is None else errors
    height, width = (min(size, of) for size, of in zip(block, w.shape, strict=True))
    magnitudes, usual, found = (np.empty(height * width, kind) for kind in (np.float32, np.uint8, np.uint8))
    room = Room(magnitudes, usual, found)
    return _encode(w, FLOATS[dtype], rounding, height, width, room, codes, scales, FLOATS[scale_dtype], both)
