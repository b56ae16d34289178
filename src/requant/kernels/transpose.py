"""Matrices turned over."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from .native import Kernel

_transpose = Kernel("transpose", "transpose")


def transpose(matrix: NDArray[Any], out: NDArray[Any]) -> None:
    """Write ``matrix`` [m, n] of unsigned integers to ``out`` [n, m]; both are C-contiguous."""
    _transpose(matrix, out)
