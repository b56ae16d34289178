"""Small checkpoints for the tests, written by the safetensors library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NUMPY_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "C64": np.dtype(np.complex64),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
"""Every element type that the library writes from numpy, by its name in headers."""

DTYPE_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}

Arrays = dict[str, np.ndarray]


def noise(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return an array of random bits (zeros and ones for BOOL)."""
    numpy_dtype = NUMPY_DTYPES[dtype]
    nbytes = int(np.prod(shape, dtype=int)) * numpy_dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "BOOL" else 256, nbytes, dtype=np.uint8)
    return bits.view(numpy_dtype).reshape(shape)


def arrays() -> st.SearchStrategy[Arrays]:
    """Draw up to eight named arrays of every element type, also 0-d and empty ones."""
    names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    array = st.builds(noise, st.sampled_from(sorted(NUMPY_DTYPES)), shapes, st.integers(0, 99))
    return st.dictionaries(names.filter(lambda name: name != "__metadata__"), array, max_size=8)


def write_checkpoint(folder: Path, shards: Mapping[str, Arrays], **index: Any) -> Path:
    """Write ``shards``, config.json and, unless there is only one, the index; ``index`` replaces parts of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "toy"}')
    if len(shards) > 1 or index:
        document = {
            "metadata": {"total_size": sum(a.nbytes for tensors in shards.values() for a in tensors.values())},
            "weight_map": {name: shard for shard, tensors in shards.items() for name in tensors},
        } | index
        (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder
