"""The manifest: what was made, of what, by which recipe, so that someone else can make it again, bit for bit.

It holds a hash of the source's headers, the recipe, requant's version, and the hash of every tensor of the output; no
time, host or path.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from requant.checkpoint.checkpoint import Checkpoint, open_checkpoint, read_shard
from requant.checkpoint.hashing import tensor_hash
from requant.checkpoint.header import TensorRef
from requant.checkpoint.names import MANIFEST
from requant.checkpoint.store import LocalStore
from requant.checkpoint.strict_json import load_object
from requant.checkpoint.writer import write_atomically
from requant.errors import CallError, Problem
from requant.execute.journal import WORK
from requant.execute.progress import Progress
from requant.execute.scratch import Scratch
from requant.execute.workers import run_parallel
from requant.plan.plan import Plan
from requant.recipe.recipe import Recipe
from requant.version import __version__


def keep_hashes(folder: Path, shard: str, hashes: Mapping[str, str]) -> None:
    """Put the hashes of a finished shard on disk, for the manifest."""
    write_atomically(_piece(folder, shard), json.dumps(hashes).encode())


def _piece(folder: Path, shard: str) -> Path:
    return folder / WORK / f"{xxhash.xxh3_64_hexdigest(shard.encode())}.hashes"


def source_digest(headers: Iterable[tuple[str, str]]) -> str:
    """Return what stands for a source: the xxh3-128 of its shards' names and header digests."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(headers)).encode())


def manifest_json(plan: Plan, folder: Path, source: str, workers: int, progress: Progress) -> bytes:
    """Return the manifest of a plan's output, all of it in ``folder``; shards without kept hashes are read again."""
    tensors: dict[str, str] = {}
    unread: list[str] = []
    for shard in plan.shards:
        piece = _piece(folder, shard.name)
        if piece.is_file():
            tensors.update(load_object(piece.read_bytes()))
        else:
            unread.append(shard.name)
    if unread:
        tensors.update(_read_hashes(folder, unread, workers, progress))
    document = {
        "requant": __version__,
        "source": source,
        "recipe": _reproducible(plan.recipe),
        "tensors": dict(sorted(tensors.items())),
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def _reproducible(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe says, with what its path holds in place of the path."""
    document = recipe.to_json()
    path = recipe.input_scale.path
    if path is None:
        return document
    if path.is_dir():
        with open_checkpoint(path) as checkpoint:
            content = source_digest((header.shard, header.digest) for header in checkpoint.shards)
    else:
        content = xxhash.xxh3_128_hexdigest(path.read_bytes())
    return document | {"input_scale": [recipe.input_scale.kind, recipe.input_scale.value, content]}


def _read_hashes(folder: Path, shards: Iterable[str], workers: int, progress: Progress) -> dict[str, str]:
    with LocalStore(folder) as store:
        tensors = [tensor for shard in shards for tensor in read_shard(store, shard).tensors]
        return hash_tensors(store, tensors, workers, progress)


def hash_tensors(store: LocalStore, tensors: list[TensorRef], workers: int, progress: Progress) -> dict[str, str]:
    """Return name → hash of tensors that are on disk."""
    found: dict[str, str] = {}
    lock = threading.Lock()

    def look_at(tensor: TensorRef, _scratch: Scratch) -> None:
        digest = tensor_hash(store, tensor)
        with lock:
            found[tensor.name] = digest
        advance(tensor.nbytes)

    with progress("hashing", sum(tensor.nbytes for tensor in tensors)) as advance:
        run_parallel(tensors, look_at, workers)
    return found


def read_manifest(path: Path) -> dict[str, str]:
    """Return name → hash from a manifest; CallError where it is none."""
    try:
        tensors = load_object(path.read_bytes())["tensors"]
        if not (isinstance(tensors, dict) and all(isinstance(digest, str) for digest in tensors.values())):
            raise ValueError("tensors is no table of hashes")
    except (OSError, ValueError, KeyError) as error:
        raise CallError(Problem("bad-option", f"manifest {path}: {error!r}", remedy=f"name a {MANIFEST}")) from None
    return tensors


def check_manifest(checkpoint: Checkpoint, path: Path, workers: int, progress: Progress) -> list[Problem]:
    """Return a problem for every tensor that is not what a manifest says."""
    wanted = read_manifest(path)
    here = {tensor.name: tensor for header in checkpoint.shards for tensor in header.tensors}
    found = hash_tensors(checkpoint.store, [here[name] for name in here.keys() & wanted.keys()], workers, progress)
    remedy = "make it again from its source, by its recipe"
    problems = [Problem("missing-part", "the manifest has it", name, remedy) for name in wanted.keys() - here.keys()]
    problems += [
        Problem("orphan-part", f"the manifest does not have it; in {here[name].shard}", name, remedy)
        for name in here.keys() - wanted.keys()
    ]
    problems += [
        Problem("differs", f"{digest} by the manifest, {found[name]} in {here[name].shard}", name, remedy)
        for name, digest in wanted.items()
        if name in found and found[name] != digest
    ]
    return sorted(problems, key=lambda problem: problem.module)
