"""Unquantized weights from one float dtype to another."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from .floats import FLOATS
from .native import Kernel

_convert = Kernel("dense", "convert")


def convert(w: NDArray[Any], dtype: str, out: NDArray[Any], out_dtype: str) -> None:
    """Write the values of ``w``, bits of ``dtype``, to ``out`` of the same shape as bits of ``out_dtype``.

    Rounds to nearest even, to infinity beyond the range; NaN stays NaN.
    """
    _convert(w.reshape(-1), FLOATS[dtype], out.reshape(-1), FLOATS[out_dtype])
