"""Which format a weight lies in, told from its parts on disk: suffixes, dtypes and shape ratios."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from requant.checkpoint.header import TensorRef
from requant.dialects.compressed_tensors import SUFFIXES
from requant.errors import Problem
from requant.formats import FLOAT_DTYPES, FORMATS

PAYLOADS = ("weight", "weight_packed")
PART_SUFFIXES = frozenset(
    {
        *PAYLOADS,
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_global_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_global_scale",
        "input_zero_point",
    }
)
"""Last name components that may belong to a quantized weight."""

DEFAULT_DTYPE = "BF16"
"""The dtype of the scales made from a source that has no float dtype of its own."""


class Weight(NamedTuple):
    """A weight as it lies on disk.

    ``module`` is the name without the part suffix, ``format`` a key of FORMATS or "" where the parts are of no
    known format, ``shape`` the logical one, ``dtype`` the float dtype of the stored values (dense) or scales;
    BF16 where the format has no float dtype. ``parts`` follow the format's order.
    """

    module: str
    format: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[TensorRef, ...]


def is_bank(module: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor holds all experts of a layer: three dimensions or more, directly below ``experts``."""
    return len(shape) >= 3 and module.rpartition(".")[0].endswith(".experts")


def recognise(module: str, tensors: Sequence[TensorRef]) -> Weight | Problem:
    """Return the weight that ``tensors``, called ``module.suffix``, are the parts of.

    A payload without the scale that its dtype calls for, and a scale without a payload, are problems.
    Parts of no known format give a weight whose ``format`` is "".
    """
    start = len(module) + 1
    found = _classify(tuple([(tensor[0][start:], tensor[1], tensor[2]) for tensor in tensors]))
    if found is not None:
        name, shape, dtype, order = found
        return Weight(module, name, shape, dtype, tuple([tensors[place] for place in order]))
    parts = {tensor.name[start:]: tensor for tensor in tensors}
    where = ", ".join(f"{suffix} {part.dtype} {list(part.shape)} in {part.shard}" for suffix, part in parts.items())
    payload = next((parts[suffix] for suffix in PAYLOADS if suffix in parts), None)
    if payload is None:
        remedy = "restore the weight's payload, or delete the stray tensor"
        return Problem("orphan-part", f"no weight beside {where}", module, remedy)
    if len(parts) == 1 and payload.dtype not in FLOAT_DTYPES and (payload.dtype in ("U8", "F8_E4M3", "F8_E5M2")):
        message = f"no scale beside {where}; read without it, every value would be wrong"
        return Problem("missing-part", message, module, f"restore {module}.weight_scale")
    rest = (part for part in parts.values() if part is not payload)
    return Weight(module, "", payload.shape, DEFAULT_DTYPE, (payload, *rest))


@lru_cache(maxsize=4096)
def _classify(
    signature: tuple[tuple[str, str, tuple[int, ...]], ...],
) -> tuple[str, tuple[int, ...], str, tuple[int, ...]] | None:
    """Return format, logical shape, float dtype and the parts' places among these (suffix, dtype, shape), or None."""
    places = [suffix for suffix, _, _ in signature]
    stored = {suffix: (dtype, shape) for suffix, dtype, shape in signature}
    for name, suffixes in SUFFIXES.items():
        if stored.keys() != set(suffixes):
            continue
        payload_dtype, payload_shape = stored[suffixes[0]]
        if name == "dense":
            if payload_dtype in FLOAT_DTYPES:
                return name, payload_shape, payload_dtype, (0,)
            continue
        if len(payload_shape) != 2:
            continue
        shape = payload_shape[0], payload_shape[1] * FORMATS[name].packing
        if shape[1] % FORMATS[name].multiple:
            continue
        for dtype in FLOAT_DTYPES:
            wanted = FORMATS[name].parts(shape, dtype)
            if all(
                stored[suffix][0] in (part.dtype, part.spells) and part.shape == stored[suffix][1]
                for part, suffix in zip(wanted, suffixes, strict=True)
            ):
                return name, shape, dtype, tuple(places.index(suffix) for suffix in suffixes)
    return None
