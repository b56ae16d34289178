"""The safetensors header: eight bytes of length, a JSON object, spaces.

The format: https://github.com/huggingface/safetensors#format. What is refused here is what the library
refuses, and what it lets pass although it cannot be meant: duplicate keys, nameless tensors.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, repeat
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from requant.checkpoint.dtypes import payload_bytes
from requant.checkpoint.faults import Faults
from requant.checkpoint.strict_json import load_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The library's own limit on the JSON."""

MAX_NAME = 512
"""The longest tensor name that is believed; real ones have about a hundred characters."""


class TensorRef(NamedTuple):
    """Where a tensor lies: ``offset`` is absolute in the file ``shard``, ``nbytes`` its size there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One file's header: ``tensors`` in file order, data from byte ``data_start`` to the file's ``size``.

    ``digest`` is the xxh3-128 (hex) of the bytes before ``data_start``.
    """

    shard: str
    size: int
    data_start: int
    metadata: dict[str, str]
    tensors: list[TensorRef]
    digest: str


def encode_header(
    specs: Iterable[tuple[str, str, tuple[int, ...], int]],
    metadata: Mapping[str, str],
    *,
    residue: int = 0,
    modulus: int = 8,
) -> bytes:
    """Return the header, length prefix included, of a file that holds ``specs`` one after the other.

    ``specs`` are name, dtype, shape and bytes. The fewest spaces follow that make the length ``residue``
    modulo ``modulus``: with the defaults, these are the bytes that the safetensors library writes.
    """
    names, kinds, sizes = [], [], []
    for name, dtype, shape, nbytes in specs:
        names.append(encode_basestring(name)[1:-1])
        kinds.append(_spell_kind(dtype, tuple(shape)))
        sizes.append(nbytes)
    text = _spell(names, kinds, sizes, metadata).encode()
    text += b" " * ((residue - PREFIX_BYTES - len(text)) % modulus)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def _spell(names: Iterable[str], kinds: Iterable[str], sizes: Iterable[int], metadata: Mapping[str, str]) -> str:
    """Return the JSON of a header; ``names`` are escaped already, ``kinds`` are texts of `_spell_kind`."""
    places = list(map(str, accumulate(sizes, initial=0)))
    rows = zip(names, kinds, places, places[1:], strict=False)
    entries = [f'"{name}":{{{kind},"data_offsets":[{start},{end}]}}' for name, kind, start, end in rows]
    if metadata:
        entries.insert(0, f'"__metadata__":{json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))}')
    return f"{{{','.join(entries)}}}"


@lru_cache(maxsize=4096)
def _spell_kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f'"dtype":"{dtype}","shape":[{",".join(map(str, shape))}]'


def parse_header(shard: str, blob: bytes, file_size: int) -> ShardHeader:
    """Parse and check the header of the file ``shard``: ``blob`` is its beginning, at least the header.

    Raises CheckpointError with every fault of the file, each naming file and tensor (``header-invalid``,
    ``name-hostile``).
    """
    faults = Faults()
    header = check_header(shard, blob, file_size, faults)
    faults.check()
    assert header is not None
    return header


def check_header(shard: str, blob: bytes, file_size: int, faults: Faults) -> ShardHeader | None:
    """Do what `parse_header` does, but add what is wrong to ``faults`` and then return None."""
    known = len(faults)
    refuse = _Refuse(shard, faults)
    try:
        data_start = _data_start(blob, file_size)
        plain = _plain_header(shard, blob[:data_start], file_size)
        if plain is not None:
            return plain
        entries = load_object(blob[PREFIX_BYTES:data_start])
    except ValueError as error:
        refuse("not a safetensors file", detail=str(error))
        return None

    metadata = entries.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if type(metadata) is not dict or not set(map(type, metadata.values())) <= {str}:
        refuse("__metadata__ is not a map of strings to strings")
    if "" in entries or "\0" in "".join(entries) or max(map(len, entries), default=0) > MAX_NAME:
        for name in entries:
            if not name or "\0" in name or len(name) > MAX_NAME:
                kind = f"tensor name empty, with a NUL, or of more than {MAX_NAME} characters"
                refuse(kind, detail=repr(name)[:200], code="name-hostile")

    table = _tabulate(entries)
    complete = table is not None
    if table is None:
        for name in list(entries):
            if _tabulate({name: entries[name]}) is None:
                refuse("malformed entry", name, repr(entries.pop(name))[:200])
        table = _tabulate(entries)
        assert table is not None
    dtypes, shapes, nbytes = _sizes(table, refuse)
    _check_places(table, file_size - data_start, complete, refuse)
    if len(faults) > known:
        return None

    offsets = (table.begins + data_start).tolist()
    refs = _refs(table.names, dtypes, shapes, shard, offsets, nbytes)
    tensors = [refs[i] for i in table.file_order()]
    return ShardHeader(shard, file_size, data_start, metadata, tensors, xxhash.xxh3_128_hexdigest(blob[:data_start]))


def _refs(
    names: Iterable[str],
    dtypes: Iterable[str],
    shapes: Iterable[tuple[int, ...]],
    shard: str,
    offsets: Iterable[int],
    nbytes: Iterable[int],
) -> list[TensorRef]:
    rows = zip(names, dtypes, shapes, repeat(shard), offsets, nbytes, strict=False)
    return list(map(partial(tuple.__new__, TensorRef), rows))  # what _make does, without a frame for each


_METADATA = re.compile(r'\{"__metadata__":(\{[^}]*\})')
_ENTRY = re.compile(r'"([^"]*)":\{("dtype":"[^\]]{0,200}\]),"data_offsets":\[')
_KIND = re.compile(r'"dtype":"(\w+)","shape":\[([\d,]*)\]', re.ASCII)


def _plain_header(shard: str, blob: bytes, file_size: int) -> ShardHeader | None:
    """Return what the header ``blob`` says if it is, but for spaces at its end, what `encode_header` writes.

    Such a header has no fault; almost every one is such, and this takes a third of the time. What is read here
    need not be right: it is spelled out again and compared. None is returned where the two differ, and for
    names, sizes and data that `check_header` has a word to say about.
    """
    characters = np.frombuffer(blob, np.uint8, offset=PREFIX_BYTES)
    try:
        text = blob[PREFIX_BYTES:].decode()
        if "\\" in text or characters.min(initial=ord(" ")) < ord(" "):
            return None  # escapes, or what must be escaped
        opening = _METADATA.match(text)
        metadata = load_object(opening[1].encode()) if opening else {}
        names, kinds = zip(*_ENTRY.findall(text, opening.end() if opening else 0), strict=True)
        known = {kind: _parse_kind(kind) for kind in set(kinds)}
    except ValueError:
        return None
    dtypes, shapes, sizes = zip(*map(known.__getitem__, kinds), strict=True)
    unique = set(names)
    if (
        not set(map(type, metadata.values())) <= {str}
        or len(unique) < len(names)
        or not unique.isdisjoint(("", "__metadata__"))
        or max(map(len, names)) > MAX_NAME
        or len(blob) + sum(sizes) != file_size
        or text.rstrip(" ") != _spell(names, kinds, sizes, metadata)
    ):
        return None
    tensors = _refs(names, dtypes, shapes, shard, accumulate(sizes, initial=len(blob)), sizes)
    return ShardHeader(shard, file_size, len(blob), metadata, tensors, xxhash.xxh3_128_hexdigest(blob))


def _parse_kind(text: str) -> tuple[str, tuple[int, ...], int]:
    """Return dtype, shape and bytes; ValueError unless ``text`` is what `_spell_kind` makes of them."""
    match = _KIND.fullmatch(text)
    if match is None:
        raise ValueError(text)
    dtype, shape = match[1], tuple(map(int, match[2].split(","))) if match[2] else ()
    if _spell_kind(dtype, shape) != text:
        raise ValueError(text)
    return dtype, shape, payload_bytes(dtype, shape)


@dataclass(frozen=True, slots=True)
class _Refuse:
    """Records what is wrong with one file."""

    shard: str
    faults: Faults

    def __call__(self, kind: str, tensor: str = "", detail: str = "", code: str = "header-invalid") -> None:
        detail = f"in {self.shard}, {detail}" if tensor else detail
        self.faults.add(code, kind, tensor or self.shard, detail)


def _data_start(blob: bytes, file_size: int) -> int:
    """Return where the data begin; ValueError if that is not in the file."""
    if blob.startswith(b"version https://git-lfs"):
        raise ValueError("a Git LFS pointer, not the file itself (git lfs pull fetches it)")
    if file_size < PREFIX_BYTES:
        raise ValueError("shorter than eight bytes")
    length = int.from_bytes(blob[:PREFIX_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length:,} bytes, over the limit of 100 MB")
    if PREFIX_BYTES + length > min(file_size, len(blob)):
        raise ValueError(f"truncated: {file_size:,} bytes, {PREFIX_BYTES + length:,} of them header")
    return PREFIX_BYTES + length


_Kind = tuple[str, tuple[int, ...]]


class _Table(NamedTuple):
    """The entries as columns, in the header's order; offsets are int64 and relative to the data start."""

    names: list[str]
    kinds: list[_Kind]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def file_order(self) -> list[int]:
        """Return the entries' indices as their data lie in the file."""
        order: list[int] = np.lexsort((self.ends, self.begins)).tolist()
        return order


def _tabulate(entries: Mapping[str, Any]) -> _Table | None:
    """Return the columns, or None if an entry is none, or has no numbers where they belong (``True``)."""
    if not entries:
        return _Table([], [], np.empty(0, np.int64), np.empty(0, np.int64))
    if not set(map(type, entries.values())) <= {dict}:
        return None
    try:
        dtypes = [entry["dtype"] for entry in entries.values()]
        lists = [entry["shape"] for entry in entries.values()]
        places = [entry["data_offsets"] for entry in entries.values()]
    except KeyError:
        return None
    if not (set(map(type, dtypes)) <= {str} and set(map(type, chain(lists, places))) <= {list}):
        return None
    shapes, numbers = list(map(tuple, lists)), list(chain.from_iterable(places))
    if not (set(map(len, places)) <= {2} and set(map(type, chain(numbers, chain.from_iterable(lists)))) <= {int}):
        return None
    try:
        offsets = np.fromiter(numbers, np.int64, len(numbers)).reshape(-1, 2)
    except OverflowError:
        return None
    if (offsets < 0).any():
        return None
    return _Table(list(entries), list(zip(dtypes, shapes, strict=True)), *offsets.T)


def _sizes(table: _Table, refuse: _Refuse) -> tuple[Sequence[str], Sequence[tuple[int, ...]], Sequence[int]]:
    """Return the columns dtype, shape and bytes, after comparing the last with the offsets.

    Thousands of tensors are alike: they share one shape tuple, and their size is computed once.
    """
    sized: dict[_Kind, tuple[str, tuple[int, ...], int]] = {}
    senseless: dict[_Kind, str] = {}
    for kind in set(table.kinds):
        try:
            sized[kind] = (*kind, payload_bytes(*kind))
        except ValueError as error:
            sized[kind], senseless[kind] = (*kind, -1), str(error)
    dtypes, shapes, nbytes = zip(*map(sized.__getitem__, table.kinds), strict=True) if sized else ((), (), ())
    wanted = np.array(nbytes, np.int64)
    for i in np.flatnonzero((wanted < 0) | (table.ends - table.begins != wanted)).tolist():
        if (kind := table.kinds[i]) in senseless:
            refuse("dtype and shape give no size", table.names[i], senseless[kind])
        else:
            span = f"[{table.begins[i]}, {table.ends[i]}] for the {nbytes[i]} bytes of {dtypes[i]} {list(shapes[i])}"
            refuse("data_offsets disagree with dtype and shape", table.names[i], span)
    return dtypes, shapes, nbytes


def _check_places(table: _Table, data_bytes: int, complete: bool, refuse: _Refuse) -> None:
    """Refuse tensors that end beyond the file and, if no entry was left out, any overlap or gap."""
    order = table.file_order()
    begins, ends = table.begins[order], table.ends[order]
    for i in np.flatnonzero(ends > data_bytes).tolist():
        refuse("data beyond the end of the file", table.names[order[i]], f"end at {ends[i]:,} of {data_bytes:,} bytes")
    if complete:
        before = np.concatenate(([0], ends))
        for i in np.flatnonzero(begins != before[:-1]).tolist():
            detail = f"start at {begins[i]:,}, the data before them end at {before[i]:,}"
            refuse("data overlap or leave a gap", table.names[order[i]], detail)
        if before[-1] < data_bytes:
            refuse("bytes after the last tensor", detail=f"{data_bytes - before[-1]:,}")
