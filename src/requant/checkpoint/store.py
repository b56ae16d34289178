"""A checkpoint folder on a local file system, as named byte ranges."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Self

from requant.checkpoint import fsio
from requant.checkpoint.names import PRIVATE_FOLDERS
from requant.errors import Problem, SurroundingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType


_BOUNCE = 4 << 20


class LocalStore:
    """Reads files below ``root``; each is opened once, and stays open until `close`.

    Names are relative with ``/``. All methods may be called from any thread. What the system refuses is a
    SurroundingsError (``io``, ``no-space``) naming the file. While ``read_once`` is set, what has been read or
    copied is dropped from the page cache.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.read_once = False
        self._descriptors: dict[str, int] = {}
        self._lock = Lock()

    def files(self) -> dict[str, int]:
        """Return every regular file below the root with its size, sorted; links are followed, tools' folders not."""
        return dict(sorted(self._walk(self.root, "", frozenset())))

    def size(self, file: str) -> int:
        """Return the size of ``file`` in bytes."""
        with fsio.naming(file):
            return os.fstat(self._descriptor(file)).st_size

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of ``file`` from ``offset``."""
        buffer = bytearray(nbytes)
        self.read_into(file, offset, buffer)
        return bytes(buffer)

    def read_into(self, file: str, offset: int, buffer: fsio.ByteBuffer) -> None:
        """Fill ``buffer`` (writable, C-contiguous) with the bytes of ``file`` from ``offset``."""
        with fsio.naming(file):
            done = fsio.read_at(self._descriptor(file), buffer, offset)
        if self.read_once:
            fsio.advise_done(self._descriptor(file), offset, done)
        if done < (wanted := len(fsio.byte_view(buffer))):
            message = f"ends at byte {offset + done:,}, {wanted - done:,} bytes early"
            raise SurroundingsError(Problem("io", message, file, "was it changed while it was read?"))

    def copy_to(self, file: str, offset: int, nbytes: int, fd: int, out_offset: int) -> None:
        """Copy ``nbytes`` of ``file`` from ``offset`` to ``out_offset`` of the open file ``fd``.

        An OSError in writing is left for the owner of ``fd`` to name.
        """
        source = self._descriptor(file)
        while nbytes and (done := fsio.copy_some(source, offset, nbytes, fd, out_offset)):
            if self.read_once:
                fsio.advise_done(source, offset, done)
            offset, out_offset, nbytes = offset + done, out_offset + done, nbytes - done
        buffer = memoryview(bytearray(min(nbytes, _BOUNCE)))
        while nbytes:
            piece = buffer[:nbytes]
            self.read_into(file, offset, piece)
            fsio.write_at(fd, piece, out_offset)
            offset, out_offset, nbytes = offset + len(piece), out_offset + len(piece), nbytes - len(piece)

    def forget(self, file: str) -> None:
        """Close ``file``: what another has taken the name of gives back its space."""
        with self._lock:
            descriptor = self._descriptors.pop(file, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Close every file; the store cannot be used afterwards."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _descriptor(self, file: str) -> int:
        with self._lock, fsio.naming(file):
            if file not in self._descriptors:
                self._descriptors[file] = _open(self.root / file)
            return self._descriptors[file]

    def _walk(self, folder: Path, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, int]]:
        with fsio.naming(prefix or folder):
            here = folder.stat()
            if (here.st_dev, here.st_ino) in above:
                return  # a link to a folder that we are in
            above |= {(here.st_dev, here.st_ino)}
            entries = list(os.scandir(folder))
        for entry in entries:
            name = prefix + entry.name
            if entry.name in PRIVATE_FOLDERS:
                continue
            if entry.is_dir():
                yield from self._walk(folder / entry.name, name + "/", above)
            elif entry.is_file():
                with fsio.naming(name):
                    yield name, entry.stat().st_size
            elif entry.is_symlink() and not (folder / entry.name).exists():
                raise SurroundingsError(Problem("io", "the link points to nothing", name))


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
