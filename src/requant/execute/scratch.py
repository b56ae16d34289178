"""Scratch buffers of one thread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from requant.formats import NUMPY_BITS, Tile


class Scratch:
    """Buffers kept from tile to tile: fresh pages would cost as much as the conversion itself."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def tile(self, slot: str, dtype: str, rows: int, columns: int) -> Tile:
        """Return an uninitialised tile that stays valid until the slot is asked for again."""
        bits = NUMPY_BITS[dtype]
        nbytes = rows * columns * bits.itemsize
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[slot] = np.empty(nbytes, np.uint8)
        return Tile(buffer[:nbytes].view(bits).reshape(rows, columns), dtype)
