"""Where compiled kernels are kept."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from functools import cache
from pathlib import Path


@cache
def cache_directory() -> Path:
    """Return the writable directory that holds the compiled form of exactly these sources.

    A kernel is compiled from several modules, so the directory is named after a hash of the whole package. It lies
    under ``NUMBA_CACHE_DIR`` if the user set that, else under ``XDG_CACHE_HOME`` or ``~/.cache``, else (read-only
    home) under a private directory of the system's temp dir.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    name = digest.hexdigest()[:16]
    for root in _preferred_roots():
        directory = root / "requant" / name
        if _writable(directory):
            return directory
    return _private_temporary_root() / name


def kernels_cached() -> bool:
    """Tell whether an earlier run left compiled kernels; if not, the first use of each takes seconds."""
    return any(cache_directory().glob("*.o"))


def _preferred_roots() -> list[Path]:
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return [Path(chosen)]
    try:
        return [Path.home() / ".cache"]
    except RuntimeError:  # a user id without an entry in the password database
        return []


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(4096))  # a full disk takes an empty file
    except OSError:
        return False
    return True


def _private_temporary_root() -> Path:
    """Return a directory that nobody else can write: a cache entry is code, and is run when loaded."""
    root = Path(tempfile.gettempdir(), f"requant-{os.getuid()}")
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="requant-"))
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return root if ours and _writable(root) else Path(tempfile.mkdtemp(prefix="requant-"))
