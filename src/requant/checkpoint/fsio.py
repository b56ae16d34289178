"""The few calls that write: thin loops over ``os``, so that a full disk can be rehearsed at any of them."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from requant.checkpoint.rehearsal import step
from requant.errors import Problem, SurroundingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

ByteBuffer: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[Any]"
"""C-contiguous memory; of an array, its bytes."""

PAGE = 4096
"""The block in which file systems share data between files."""

_CHUNK = 64 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}
_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV}


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Turn an OSError into a SurroundingsError that names ``path``: ``no-space`` or ``io``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            remedy = "free some space and run the same command again: it continues"
            problem = Problem("no-space", os.strerror(error.errno or 0), str(path), remedy)
        else:
            problem = Problem("io", error.strerror or str(error), str(path))
        raise SurroundingsError(problem) from error


def byte_view(buffer: ByteBuffer) -> memoryview:
    """Return the bytes of ``buffer`` as a flat view."""
    view = memoryview(cast("bytes", buffer))  # numpy's stubs know the buffer protocol from Python 3.12 on
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast refuses an extent of zero


def create(path: Path) -> int:
    """Open ``path`` for reading and writing, empty, and return the descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)


def preallocate(fd: int, nbytes: int) -> None:
    """Give the file its size, and its blocks, too, where the file system can.

    By Linux's own call: where it is not supported, glibc's ``posix_fallocate`` writes into every block.
    """
    try:
        fallocate(fd, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        os.ftruncate(fd, nbytes)


def fallocate(fd: int, nbytes: int) -> None:
    """Call fallocate(2), which Python lacks; OSError ENOSYS where the system lacks it."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    while call(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def write_at(fd: int, buffer: ByteBuffer, offset: int) -> None:
    """Write all of ``buffer`` (C-contiguous) at ``offset``."""
    step("write")
    view = byte_view(buffer)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_at(fd: int, buffer: ByteBuffer, offset: int) -> int:
    """Fill ``buffer`` (writable, C-contiguous) from ``offset``; return the bytes read, fewer at the end."""
    view, done = byte_view(buffer), 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], offset + done)):
        done += got
    return done


def copy_some(source: int, offset: int, nbytes: int, target: int, out_offset: int) -> int:
    """Copy up to ``nbytes`` within the kernel, sharing blocks where the file system can.

    Returns the bytes copied; 0 if the kernel cannot, or not between these two files.
    """
    if not hasattr(os, "copy_file_range"):
        return 0
    step("write")
    # Sharing starts and ends at a block: a ragged head goes alone, so that the rest is not copied for it.
    head = -offset % PAGE
    if head and (offset - out_offset) % PAGE == 0:
        nbytes = min(nbytes, head)
    try:
        return os.copy_file_range(source, target, min(nbytes, _CHUNK), offset, out_offset)
    except OSError as error:
        if error.errno not in _UNSUPPORTED | {errno.EIO}:  # reading and writing apart tell which side EIO is on
            raise
        return 0


def advise_done(fd: int, offset: int, nbytes: int) -> None:
    """Tell the kernel that these bytes are not needed again: write them back, drop them from the cache."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def sync(fd: int) -> None:
    """Wait until the file is on disk."""
    step("fsync")
    os.fsync(fd)


def publish(temp: Path, path: Path) -> None:
    """Give the finished (and synced) file ``temp`` its name, for good."""
    step("rename")
    os.replace(temp, path)  # noqa: PTH105
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
