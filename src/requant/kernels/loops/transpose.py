"""Matrices turned over: see `requant.kernels.transpose`."""

from __future__ import annotations

from typing import Any

from .jit import kernel

_SIDE = 64


@kernel
def transpose(matrix: Any, out: Any) -> None:
    """Write ``matrix`` [m, n] to ``out`` [n, m], square by square, so that the lines of both stay in the cache."""
    rows, columns = matrix.shape
    for top in range(0, rows, _SIDE):
        bottom = min(top + _SIDE, rows)
        for left in range(0, columns, _SIDE):
            for j in range(left, min(left + _SIDE, columns)):
                for i in range(top, bottom):
                    out[j, i] = matrix[i, j]
