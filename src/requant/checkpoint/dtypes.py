"""The element types of the safetensors format, in the order that decides where a tensor lies."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_BYTES = 2**63 - 1
"""Largest size or offset a file can have on the systems that run us (``off_t``)."""


class Dtype(NamedTuple):
    """An element type: its name in headers, its width in bits, its place in safetensors' ``Dtype`` enum."""

    name: str
    bits: int
    rank: int


# In the order of the enum in safetensors/src/tensor.rs ("MUST be in increasing alignment order").
_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

DTYPES: Mapping[str, Dtype] = MappingProxyType(
    {name: Dtype(name, bits, rank) for rank, (name, bits) in enumerate(_BITS.items())}
)
"""Every element type of the format by its name in headers."""


def payload_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes that a tensor of ``dtype`` and ``shape`` occupies.

    Raises ValueError, with the reason, for an unknown dtype, a negative extent, a size no file can have,
    and a packed tensor (F4, F6) that does not end at a byte.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    bits = DTYPES[dtype].bits
    for extent in shape:
        if extent < 0:
            raise ValueError(f"negative extent {extent} in the shape")
        bits *= extent
        if bits > 8 * MAX_BYTES:
            raise ValueError("the shape's size overflows")
    if bits % 8:
        raise ValueError(f"{bits} bits of {dtype} do not end at a byte")
    return bits // 8
