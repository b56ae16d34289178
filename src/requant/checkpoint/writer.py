"""Files that appear whole or not at all: written under another name, synced, renamed."""

from __future__ import annotations

import os
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

from xxhash import xxh3_64_hexdigest

from requant.checkpoint import fsio
from requant.checkpoint.hashing import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from requant.checkpoint.hashing import TensorHashes
    from requant.checkpoint.layout import CopyRun, ShardLayout
    from requant.checkpoint.store import LocalStore

_DROP_EVERY = 128 << 20


class ShardWriter:
    """Writes one shard: its header at once, its parts in any order from any thread, its name at the end.

    ``temp`` is on the same file system and no name a loader looks for. What has been written is dropped from the
    page cache. ``hashes`` is fed what is written, and, read beside the copying, what is copied. What the system refuses
    is a SurroundingsError (``no-space``, ``io``) naming the file.
    """

    def __init__(
        self, path: Path, temp: Path, layout: ShardLayout, header: bytes, hashes: TensorHashes | None = None
    ) -> None:
        if temp.suffix == ".safetensors":
            raise ValueError(f"a loader would take {temp.name} for a finished shard")
        self._path, self._temp, self._hashes = path, temp, hashes
        self._data_start, self._data_bytes = len(header), layout.data_bytes
        self._dirty, self._lock = 0, Lock()
        with fsio.naming(temp):
            self._fd = fsio.create(temp)
            try:
                fsio.preallocate(self._fd, len(header) + layout.data_bytes)
                fsio.write_at(self._fd, header, 0)
            except BaseException:
                self.discard()
                raise

    def write(self, start: int, buffer: fsio.ByteBuffer) -> None:
        """Write ``buffer`` (C-contiguous) at ``start`` bytes into the data."""
        view = fsio.byte_view(buffer)
        self._check(start, len(view))
        with fsio.naming(self._temp):
            fsio.write_at(self._fd, view, self._data_start + start)
        if self._hashes is not None:
            self._hashes.feed(start, view)
        self._written(len(view))

    def copy(self, store: LocalStore, run: CopyRun) -> None:
        """Copy ``run`` out of ``store``."""
        self._check(run.start, run.nbytes)
        with fsio.naming(self._temp):
            store.copy_to(run.shard, run.source_offset, run.nbytes, self._fd, self._data_start + run.start)
        if self._hashes is not None:
            for done in range(0, run.nbytes, CHUNK):
                piece = store.read(run.shard, run.source_offset + done, min(CHUNK, run.nbytes - done))
                self._hashes.feed(run.start + done, memoryview(piece))
        self._written(run.nbytes)

    def finish(self) -> None:
        """Put the file on disk and give it its name."""
        with fsio.naming(self._temp):
            fsio.sync(self._fd)
            fsio.advise_done(self._fd, 0, 0)
            self._close()
            fsio.publish(self._temp, self._path)

    def discard(self) -> None:
        """Drop what was written; also after a `finish` that failed."""
        with suppress(OSError):  # the next attempt starts with an empty file anyway
            self._close()
            self._temp.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _check(self, start: int, nbytes: int) -> None:
        if start < 0 or start + nbytes > self._data_bytes:
            raise ValueError(f"{nbytes} bytes at {start} are not within {self._data_bytes} of {self._path.name}")

    def _written(self, nbytes: int) -> None:
        """Drop from the page cache, now and then, what is on disk.

        What is dirty begins to be written by the same call (mm/fadvise.c), which keeps the final sync short; and
        the pages that become free are those that the next bytes take, instead of ones that have to be found.
        """
        with self._lock:
            self._dirty += nbytes
            due = self._dirty >= _DROP_EVERY
            if due:
                self._dirty = 0
        if due:
            fsio.advise_done(self._fd, 0, 0)


def write_atomically(path: Path, data: bytes) -> None:
    """Make ``path`` a file that holds ``data``: a reader, or a crash, sees the old file or the new one."""
    _replace(path, lambda fd: fsio.write_at(fd, data, 0))


def copy_file(store: LocalStore, file: str, path: Path) -> None:
    """Copy ``file`` out of ``store`` to ``path``, whose folders are made; it appears whole."""
    _replace(path, lambda fd: store.copy_to(file, 0, store.size(file), fd, 0))


def _replace(path: Path, fill: Callable[[int], None]) -> None:
    # A digest: the name itself may already be as long as a name can be.
    temp = path.with_name(f".{xxh3_64_hexdigest(path.name.encode())}.requant-tmp")
    with fsio.naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fd = fsio.create(temp)
            try:
                fill(fd)
                fsio.sync(fd)
            finally:
                os.close(fd)
            fsio.publish(temp, path)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
