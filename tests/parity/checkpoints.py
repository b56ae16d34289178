"""Checkpoints as the parity tests see them: named arrays written to a folder, named bytes read back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import ModuleType

    import numpy as np
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[np.generic]]


class Source(NamedTuple):
    """A checkpoint to write: tensors by shard, its config.json, and what a conversion is told to leave alone."""

    shards: Mapping[str, Arrays]
    config: Mapping[str, Any]
    ignore: tuple[str, ...] = ()


class Stored(NamedTuple):
    """A tensor on disk."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def write(source: Source, folder: Path) -> Path:
    """Write ``source`` with safetensors' own library, an index beside it where there are several shards."""
    folder.mkdir(parents=True)
    for shard, arrays in source.shards.items():
        save_file(dict(arrays), folder / shard, metadata={"format": "pt"})
    if len(source.shards) > 1:
        weight_map = {name: shard for shard, arrays in source.shards.items() for name in arrays}
        size = sum(array.nbytes for arrays in source.shards.values() for array in arrays.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(source.config, indent=2))
    return folder


def read(path: Path) -> dict[str, Stored]:
    """Read every tensor of a safetensors file, or of all those in a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {
        name: Stored(view["dtype"], tuple(view["shape"]), bytes(view["data"]))
        for file in files
        for name, view in safetensors.deserialize(file.read_bytes())
    }


def differences(ours: Mapping[str, Stored], theirs: Mapping[str, Stored]) -> list[str]:
    """Say, a line per tensor, in what two checkpoints differ; an empty list: in nothing."""
    lines = [f"{name}: only in ours" for name in sorted(ours.keys() - theirs.keys())]
    lines += [f"{name}: only in theirs" for name in sorted(theirs.keys() - ours.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        a, b = ours[name], theirs[name]
        if a[:2] != b[:2]:
            lines.append(f"{name}: {a.dtype} {a.shape} against {b.dtype} {b.shape}")
        elif a.data != b.data:
            unequal = [i for i, (x, y) in enumerate(zip(a.data, b.data, strict=True)) if x != y]
            first = unequal[0]
            lines.append(
                f"{name} ({a.dtype} {a.shape}): {len(unequal)} of {len(a.data)} bytes, "
                f"first at {first}: {a.data[first]:#04x} against {b.data[first]:#04x}"
            )
    return lines


def assert_same_meaning(oracle: ModuleType, ours: Path, theirs: Path) -> None:
    """Assert that compressed-tensors reads the same out of two configs, for every weight of the first."""
    modules = sorted({name.rpartition(".")[0] for name, t in read(ours).items() if len(t.shape) == 2})
    expected = oracle.meaning(oracle.quantization_config(theirs), modules)
    assert oracle.meaning(oracle.quantization_config(ours), modules) == expected
