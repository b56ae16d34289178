"""Weights, and what the FP8 formats make of them, as plain arrays of values."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from requant.formats import FORMATS, NUMPY_BITS, Tile

VALUES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


def encode(name, w, dtype, how, scale_dtype=None):
    """Return the codes and the scales (float32) of a weight given in its dtype, encoded in tiles of 128 rows."""
    how = how._replace(amax=float(abs(w.astype(np.float64)).max()))
    bits = w.view(NUMPY_BITS[dtype])
    scale_dtype = scale_dtype or (dtype if how.reference else "F32")
    parts = FORMATS[name].parts(w.shape, scale_dtype)
    arrays = [np.zeros(part.shape, NUMPY_BITS[part.dtype]) for part in parts]
    for top in range(0, len(w), 128):
        rows = slice(top, top + 128)
        bands = {0: slice(None), 1: rows, 128: slice(top // 128, top // 128 + 1)}
        tiles = [Tile(a[bands[part.rows]], part.spells) for a, part in zip(arrays, parts, strict=True)]
        assert FORMATS[name].encode(Tile(bits[rows], dtype), tiles, how) == -1
    return arrays[0], arrays[1].view(VALUES[scale_dtype]).astype(np.float32)


def decode(name, codes, scales):
    """Decode to float32 with F32 scales."""
    out = np.empty(codes.shape, np.uint32)
    scales = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    FORMATS[name].decode((Tile(codes, "F8_E4M3"), Tile(scales, "F32")), Tile(out, "F32"))
    return out.view(np.float32)


def spread(name, scales, shape):
    """Scales, one for each value."""
    if name == "fp8-block":
        scales = scales.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
    return np.broadcast_to(scales, shape)


def regions(name, values, of):
    """The result of a function for each region that has a scale, in the shape of the scales."""
    if name == "fp8-tensor":
        return np.array([of(values)])
    height, width = (1, values.shape[1]) if name == "fp8-channel" else (128, 128)
    rows, columns = range(0, values.shape[0], height), range(0, values.shape[1], width)
    return np.array([[of(values[r : r + height, c : c + width]) for c in columns] for r in rows])


def weight(shape, dtype, seed, kind="gauss"):
    rng = np.random.default_rng(seed)
    w = rng.standard_t(3, shape) if kind == "t3" else rng.standard_normal(shape)
    w = w * 2.0 ** rng.integers(-12, 8, (-(-shape[0] // 128), 1)).repeat(128, 0)[: shape[0]]
    w[rng.random(shape) < 0.02] = -0.0
    return w.astype(VALUES[dtype])
