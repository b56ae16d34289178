"""Hashes of tensors that do not depend on the order in which their bytes come.

A tensor's hash is the xxh3-128 of the xxh3-128 digests of its 4-MiB chunks, one after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from threading import Lock
from typing import TYPE_CHECKING

import xxhash

from requant.checkpoint import fsio

if TYPE_CHECKING:
    from requant.checkpoint.header import TensorRef
    from requant.checkpoint.layout import ShardLayout
    from requant.checkpoint.store import LocalStore

CHUNK = 4 << 20
"""Bytes that are hashed at a time."""

_DIGEST = 16


class TensorHashes:
    """The hashes of a shard's tensors while it is written, from any thread and in any order; each byte once.

    Chunks of which only a part has come are held.
    """

    def __init__(self, layout: ShardLayout) -> None:
        # Where tensors without bytes start, others do, too.
        placed = [
            (start, tensor) for start, tensor in zip(layout.starts(), layout.tensors, strict=True) if tensor.nbytes
        ]
        self._names = [tensor.name for tensor in layout.tensors]
        self._starts = [start for start, _ in placed]
        self._tensors = [tensor for _, tensor in placed]
        self._digests = [bytearray(_DIGEST * -(-tensor.nbytes // CHUNK)) for tensor in self._tensors]
        self._partial: dict[tuple[int, int], tuple[bytearray, list[int]]] = {}
        self._lock = Lock()

    def feed(self, start: int, data: memoryview) -> None:
        """Take bytes that lie at ``start`` in the shard's data."""
        while data:
            index = bisect_right(self._starts, start) - 1
            within = start - self._starts[index]
            number = within // CHUNK
            size = min(CHUNK, self._tensors[index].nbytes - number * CHUNK)
            offset = within - number * CHUNK
            piece = data[: size - offset]
            if len(piece) == size:
                self._set(index, number, xxhash.xxh3_128_digest(piece))
            else:
                self._hold(index, number, size, offset, piece)
            start, data = start + len(piece), data[len(piece) :]

    def _hold(self, index: int, number: int, size: int, offset: int, piece: memoryview) -> None:
        with self._lock:
            chunk, missing = self._partial.setdefault((index, number), (bytearray(size), [size]))
            chunk[offset : offset + len(piece)] = piece
            missing[0] -= len(piece)
            if missing[0]:
                return
            del self._partial[index, number]
        self._set(index, number, xxhash.xxh3_128_digest(chunk))

    def _set(self, index: int, number: int, digest: bytes) -> None:
        self._digests[index][_DIGEST * number : _DIGEST * (number + 1)] = digest

    def result(self) -> dict[str, str]:
        """Return name → hash (hex), when all bytes have come."""
        if self._partial:
            raise AssertionError("a shard is hashed when all of it has been written")
        found = dict.fromkeys(self._names, xxhash.xxh3_128_hexdigest(b""))
        found.update(
            (tensor.name, xxhash.xxh3_128_hexdigest(digests))
            for tensor, digests in zip(self._tensors, self._digests, strict=True)
        )
        return found


def tensor_hash(store: LocalStore, tensor: TensorRef) -> str:
    """Return the hash of a tensor that is on disk."""
    digests = bytearray()
    buffer = bytearray(min(CHUNK, tensor.nbytes))
    for start in range(0, tensor.nbytes, CHUNK):
        piece = fsio.byte_view(buffer)[: tensor.nbytes - start]
        store.read_into(tensor.shard, tensor.offset + start, piece)
        digests += xxhash.xxh3_128_digest(piece)
    return xxhash.xxh3_128_hexdigest(digests)
