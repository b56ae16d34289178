"""What stored weights stand for, in float64 and by the definitions of the formats alone: numpy, nothing of requant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from parity.checkpoints import Stored

    Values = NDArray[np.float64]


DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.uint32,
    "I64": np.int64,
}
BLOCK = 128


def values(tensors: Mapping[str, Stored]) -> dict[str, Values]:
    """Return the values of every 2-D weight, by module."""
    modules: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = tensor
    return {
        module: _weight({suffix: array(tensor) for suffix, tensor in parts.items()})
        for module, parts in modules.items()
        if any(len(parts[suffix].shape) == 2 for suffix in ("weight", "weight_packed") if suffix in parts)
    }


def array(tensor: Stored) -> NDArray[Any]:
    return np.frombuffer(tensor.data, DTYPES[tensor.dtype]).reshape(tensor.shape)


def spread(scales: NDArray[Any], shape: tuple[int, int]) -> Values:
    """Repeat scales ``[1]``, ``[out, 1]``, ``[out, groups]``, or those of blocks, over a weight."""
    factors = scales.astype(np.float64)
    if factors.size == 1:
        return np.full(shape, factors.item())
    factors = factors.reshape([size for place, size in enumerate(factors.shape) if place % 2 == 0 or factors.ndim == 2])
    if factors.shape[0] != shape[0]:
        return factors.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)[: shape[0], : shape[1]]
    return factors.repeat(shape[1] // factors.shape[1], axis=1)


def _weight(parts: Mapping[str, NDArray[Any]]) -> Values:
    payload = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    suffixes = ("weight_scale", "weight_scale_inv", "scale", "qscale_weight")
    scales = next((parts[suffix] for suffix in suffixes if suffix in parts), None)
    if scales is None:
        return payload.astype(np.float64)
    if scales.dtype == np.uint8:
        scales = 2.0 ** (scales.astype(np.float64) - 127)
    if payload.dtype == np.uint32:
        codes = _integers(payload, scales, parts)
    elif payload.dtype == np.uint8 or (payload.dtype == np.int8 and scales.shape[1] * 16 == payload.shape[1]):
        payload = payload.view(np.uint8)
        nibbles = np.stack([payload & 15, payload >> 4], axis=-1).reshape(payload.shape[0], -1)
        codes = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    else:
        codes = payload.astype(np.float64)
    product = codes * spread(scales, codes.shape)
    if "weight_global_scale" in parts:
        return product / float(parts["weight_global_scale"][0])
    return product * float(parts.get("weight_scale_2", np.float32(1)))


def _integers(words: NDArray[Any], scales: NDArray[Any], parts: Mapping[str, NDArray[Any]]) -> Values:
    rows, columns = parts["weight_shape"]
    bits = 32 * words.shape[1] // columns
    codes = _unpack(words, bits)[:, :columns]
    if "weight_zero_point" not in parts:
        return codes - 2.0 ** (bits - 1)
    zeros = _unpack(np.ascontiguousarray(parts["weight_zero_point"].T), bits).T[:rows]
    return codes - spread(zeros, (rows, columns))


def _unpack(words: NDArray[Any], bits: int) -> Values:
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words[..., None] >> shifts & np.uint32(2**bits - 1)).reshape(len(words), -1).astype(np.float64)


def largest(magnitudes: Values, region: tuple[int, int]) -> Values:
    """Return the largest of each region of rows x columns, repeated over it; 0: all of them."""
    shape = magnitudes.shape
    height, width = (step or size for step, size in zip(region, shape, strict=True))
    found = np.maximum.reduceat(magnitudes, np.arange(0, shape[0], height), axis=0)
    found = np.maximum.reduceat(found, np.arange(0, shape[1], width), axis=1)
    return found.repeat(height, axis=0).repeat(width, axis=1)[: shape[0], : shape[1]]


def stored(folder: Path) -> dict[str, Values]:
    """Return the values of a checkpoint's weights."""
    from parity.checkpoints import read

    return values(read(folder))
