"""The index that says which shard holds which tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from requant.checkpoint.names import is_hostile, is_private
from requant.checkpoint.strict_json import load_object

if TYPE_CHECKING:
    from requant.checkpoint.faults import Faults
    from requant.checkpoint.store import LocalStore

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Index:
    """An index file's name and metadata; ``total_size`` is what it claims, if it does."""

    file: str
    metadata: dict[str, Any]
    total_size: Any


def read_index(store: LocalStore, file: str, nbytes: int, faults: Faults) -> tuple[Index, dict[str, str]] | None:
    """Return the index (of ``nbytes`` bytes) and its weight_map, tensor to shard.

    What is wrong goes to ``faults`` (``index-mismatch``, ``name-hostile``), and None is returned if nothing
    can be made of it. The tensors of a shard with a hostile name are left out.
    """
    try:
        document = load_object(store.read(file, 0, nbytes))
        metadata, weight_map = document.get("metadata") or {}, document.get("weight_map")
        if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
            raise ValueError("weight_map or metadata is not an object")
        if not weight_map:
            raise ValueError("weight_map is empty")
        if set(map(type, weight_map.values())) - {str}:
            raise ValueError("weight_map holds something that is no file name")
    except ValueError as error:
        faults.add("index-mismatch", "the index cannot be read", file, str(error))
        return None
    shards = dict.fromkeys(weight_map.values())
    bad = [s for s in shards if is_hostile(s) or is_private(s) or not s.endswith(".safetensors")]
    for shard in bad:
        faults.add("name-hostile", "not the name of a shard in this folder", file, repr(shard))
    if bad:
        weight_map = {name: shard for name, shard in weight_map.items() if shard not in bad}
    rest = {key: value for key, value in metadata.items() if key != "total_size"}
    return Index(file, rest, metadata.get("total_size")), weight_map
