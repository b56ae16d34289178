"""A checkpoint folder, opened: every header read and checked, not a byte of data."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from requant.checkpoint.faults import Faults
from requant.checkpoint.header import MAX_HEADER_BYTES, PREFIX_BYTES, ShardHeader, check_header
from requant.checkpoint.index import INDEX_NAME, Index, read_index
from requant.checkpoint.names import CONFIG_FILES, MISTRAL_WEIGHTS, is_private, is_weight_file
from requant.checkpoint.store import LocalStore
from requant.errors import CallError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

_FIRST_READ = 1 << 20
_SUFFIX = ".safetensors"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the headers, the index and config.json say.

    ``shards`` are in the order of their names. ``index`` is None for
    a single file, ``config`` the bytes of ``config_file`` or None; ``notes`` is what the user should know.
    As a context manager, it closes the store.
    """

    store: LocalStore
    shards: tuple[ShardHeader, ...]
    index: Index | None
    config: bytes | None
    notes: tuple[str, ...]
    config_file: str = CONFIG_FILES[0]

    @property
    def tensor_count(self) -> int:
        """How many tensors there are."""
        return sum(len(shard.tensors) for shard in self.shards)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors; a header's check leaves neither gaps nor anything behind them."""
        return sum(shard.size - shard.data_start for shard in self.shards)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.close()


def open_checkpoint(path: Path | str, *, under_work: tuple[str, str] | None = None) -> Checkpoint:
    """Read every header of the checkpoint in the folder ``path``; its ``store`` stays open.

    ``under_work``: of a checkpoint that is being rewritten, the name of its config, and what that is called meanwhile.
    Its index need not agree with its shards.

    Raises CallError if there is no such folder, and CheckpointError with every problem of every file:
    ``header-invalid``, ``index-mismatch``, ``name-hostile``.
    """
    root = Path(path)
    if not root.is_dir():
        raise CallError(Problem("bad-source", f"{root} is not a folder"))
    store = LocalStore(root)
    try:
        with gc_paused():
            return _open(store, under_work)
    except BaseException:
        store.close()
        raise


def _open(store: LocalStore, under_work: tuple[str, str] | None) -> Checkpoint:
    faults, notes = Faults(), list[str]()
    files = store.files()
    index, shards, weight_map = _find_shards(store, files, faults)
    unread = [file for file in files if is_weight_file(file) and file not in shards and not is_private(file)]
    if unread:
        notes.append(f"weight files that are not part of the checkpoint are not read: {', '.join(unread)}")
    headers = _read_headers(store, files, shards, None if under_work else weight_map, faults)
    faults.check()
    if index is not None and index.total_size is not None:
        total_size = sum(header.size - header.data_start for header in headers)
        if index.total_size != total_size:
            notes.append(f"{index.file} claims a total_size of {index.total_size}, the tensors have {total_size}")
    config_file, read_from = under_work or (_config_file(files, shards),) * 2
    config = store.read(read_from, 0, files[read_from]) if read_from in files else None
    return Checkpoint(store, headers, index, config, tuple(notes), config_file)


def _config_file(files: Mapping[str, int], shards: list[str]) -> str:
    """Return the config that engines read with these shards: Mistral's, where there are both, with Mistral's shards."""
    mistral = all(shard.startswith(MISTRAL_WEIGHTS) for shard in shards)
    return next((file for file in CONFIG_FILES[:: -1 if mistral else 1] if file in files), CONFIG_FILES[0])


def _find_shards(
    store: LocalStore, files: Mapping[str, int], faults: Faults
) -> tuple[Index | None, list[str], dict[str, str] | None]:
    """Return the index, the shards, and the shard that each tensor should be in (None: no index says so)."""
    here = [file for file in files if "/" not in file]
    weights = [file for file in here if file.endswith(_SUFFIX)]
    indexes = [file for file in here if file.endswith(_SUFFIX + ".index.json")]
    if INDEX_NAME in indexes:
        indexes = [INDEX_NAME]
    if len(indexes) > 1:
        faults.add("index-mismatch", "several indexes, none of them is " + INDEX_NAME, "", ", ".join(indexes))
    elif indexes:
        parsed = read_index(store, indexes[0], files[indexes[0]], faults)
        if parsed is not None:
            index, weight_map = parsed
            return index, sorted(set(weight_map.values())), weight_map
    elif _SINGLE in weights or len(weights) == 1:
        return None, [_SINGLE if _SINGLE in weights else weights[0]], None
    elif weights:
        faults.add("index-mismatch", "several weight files and no index", "", ", ".join(weights))
    else:
        faults.add("index-mismatch", "no safetensors file", str(store.root))
    return None, [], None


def _read_headers(
    store: LocalStore, files: Mapping[str, int], shards: list[str], weight_map: dict[str, str] | None, faults: Faults
) -> tuple[ShardHeader, ...]:
    """Read the headers of ``shards`` and compare them with what the index says."""
    headers: list[ShardHeader] = []
    unread: set[str] = set()
    for shard in shards:
        if shard not in files:
            unread.add(shard)
            faults.add("index-mismatch", "the index names a file that is not there", shard)
            continue
        header = _read_header(store, shard, files[shard], faults)
        if header is None:
            unread.add(shard)
            continue
        headers.append(header)
    if weight_map is not None:
        _compare(headers, weight_map, unread, faults)
    return tuple(headers)


def read_shard(store: LocalStore, shard: str) -> ShardHeader:
    """Read the header of one shard, whatever an index says; CheckpointError where it is broken."""
    faults = Faults()
    header = _read_header(store, shard, store.size(shard), faults)
    faults.check()
    assert header is not None
    return header


def _read_header(store: LocalStore, shard: str, size: int, faults: Faults) -> ShardHeader | None:
    blob = store.read(shard, 0, min(size, _FIRST_READ))
    needed = PREFIX_BYTES + int.from_bytes(blob[:PREFIX_BYTES], "little")
    if len(blob) < needed <= min(size, PREFIX_BYTES + MAX_HEADER_BYTES):
        blob += store.read(shard, len(blob), needed - len(blob))
    return check_header(shard, blob, size, faults)


def _compare(headers: list[ShardHeader], weight_map: dict[str, str], unread: set[str], faults: Faults) -> None:
    """Report what the index promises and a shard lacks, and what a shard holds beyond that."""
    in_place = 0
    for header in headers:
        in_place += [weight_map.get(tensor.name) for tensor in header.tensors].count(header.shard)
    if in_place == len(weight_map) == sum(len(header.tensors) for header in headers):
        return
    found: dict[str, list[str]] = {}
    for header in headers:
        for tensor in header.tensors:
            found.setdefault(tensor.name, []).append(header.shard)
    for name, shards in found.items():
        place = ", ".join(shards)
        if name not in weight_map:
            faults.add("index-mismatch", "not in the index", name, f"in {place}")
        elif len(shards) > 1:
            faults.add("index-mismatch", "in more than one shard", name, place)
        elif shards[0] != weight_map[name] and weight_map[name] not in unread:
            faults.add("index-mismatch", "not where the index says", name, f"in {place}, not {weight_map[name]}")
    for name, shard in weight_map.items():
        if name not in found and shard not in unread:
            faults.add("index-mismatch", "in the index, not in its shard", name, f"not in {shard}")


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the cycle collector from walking a million new objects again and again; none is in a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
