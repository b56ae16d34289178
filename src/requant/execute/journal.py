"""The destination while work is under way: whose it is, which shards are done, who holds it.

DST/.requant holds ``journal.json``, the lock and the shards being written; it goes when config.json has come.
The lock is flock's and dies with its holder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from requant.checkpoint.fsio import naming, sync_folder
from requant.checkpoint.names import CONFIG_FILES
from requant.checkpoint.writer import write_atomically
from requant.errors import CallError, Problem, SurroundingsError
from requant.execute.values import Values
from requant.plan.plan import Plan
from requant.version import __version__

WORK = ".requant"
_JOURNAL, _LOCK = "journal.json", "lock"
_NOT_OURS = frozenset({"lost+found"})
"""Entries that a fresh file system has at its mount point."""


@dataclass(slots=True)
class Journal:
    """The record of a job: ``files`` it may write, ``done`` shards with the fate of their values.

    ``upgrade`` is what one must know to go on (see `requant.execute.upgrade`), ``replaced`` is told what shard is done.
    """

    folder: Path
    fingerprint: str
    files: list[str]
    done: dict[str, Values] = field(default_factory=dict)
    upgrade: dict[str, Any] | None = None
    replaced: Callable[[str], None] = lambda _shard: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def mark_done(self, shard: str, values: Values) -> None:
        """Record that a shard is in place; durable when this returns."""
        with self._lock:
            self.done[shard] = values
            self.write()
        self.replaced(shard)

    def begin(self) -> None:
        """Put the journal on disk, and remove what an interrupted writer has left."""
        self.write()
        for stale in (self.folder / WORK).glob("*.partial"):
            stale.unlink()

    def write(self) -> None:
        """Put the journal on disk."""
        done = {shard: asdict(values) for shard, values in self.done.items()}
        record: dict[str, Any] = {"fingerprint": self.fingerprint, "files": self.files, "done": done}
        if self.upgrade is not None:
            record["upgrade"] = self.upgrade
        write_atomically(self.folder / WORK / _JOURNAL, json.dumps(record, indent=1).encode())

    def close(self) -> None:
        """Remove every trace of work under way."""
        (self.folder / WORK / _JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(self.folder / WORK, ignore_errors=True)


def read_journal(folder: Path) -> dict[str, Any] | None:
    """Return the journal of the work under way in ``folder``; None without one."""
    try:
        record = json.loads((folder / WORK / _JOURNAL).read_bytes())
        if not all(isinstance(text, str) for text in (record["fingerprint"], *record["files"])):
            raise TypeError("not a journal of this version")
        {shard: Values(**values) for shard, values in record["done"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NotADirectoryError) as error:
        message = f"{folder / WORK / _JOURNAL} cannot be read: {error}"
        raise CallError(Problem("fingerprint", message, remedy="use another DST, or remove this one")) from None
    return record  # type: ignore[no-any-return]


def check_destination(folder: Path, fingerprint: str, restart: bool) -> bool:
    """Return whether ``folder`` holds this very job, half done; touch nothing.

    CallError if the folder is neither empty nor ours, or holds another job and ``restart`` is not given.
    """
    remedy = "name a new or empty folder"
    if not folder.is_dir():
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        if folder.exists() or folder.is_symlink() or not above.is_dir():
            raise CallError(Problem("bad-destination", f"{folder} is not, and cannot become, a folder", remedy=remedy))
        _check_writable(above)
        return False
    _check_writable(folder)
    if (folder / WORK).is_symlink():
        raise CallError(Problem("bad-destination", f"{folder / WORK} is a link", remedy=remedy))
    entries = {entry.name for entry in folder.iterdir()} - _NOT_OURS
    record = read_journal(folder)
    if record is None:
        if entries - {WORK}:
            message = f"{folder} is neither empty nor work under way"
            if not entries.isdisjoint(CONFIG_FILES):
                message += "; its config says that what is there is finished"
            raise CallError(Problem("bad-destination", message, remedy=remedy))
        return False
    if "upgrade" in record:
        message = f"{folder} is a checkpoint that is being upgraded"
        raise CallError(
            Problem("fingerprint", message, remedy="finish that with `requant upgrade`, or name another DST")
        )
    if record["fingerprint"] != fingerprint and not restart:
        message = f"{folder} holds an unfinished job with other options, another version or another source"
        remedy = "finish it with its own options, or --restart to discard it"
        raise CallError(Problem("fingerprint", message, remedy=remedy))
    return record["fingerprint"] == fingerprint and not restart


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SurroundingsError(Problem("io", f"{folder} cannot be written", remedy="name another DST"))


@contextlib.contextmanager
def claim(folder: Path, fingerprint: str, files: Sequence[str], restart: bool) -> Iterator[Journal]:
    """Lock ``folder`` (made if need be) and yield its journal, new or continued."""
    with naming(folder):
        (folder / WORK).mkdir(parents=True, exist_ok=True)
        sync_folder(folder)
        sync_folder(folder.absolute().parent)
    with _locked(folder / WORK / _LOCK, folder):
        resume = check_destination(folder, fingerprint, restart)
        record = read_journal(folder)
        if record is not None and not resume:
            _clear(folder, record)
        journal = Journal(folder, fingerprint, sorted(files))
        if record is not None and resume:
            journal.done = {shard: Values(**values) for shard, values in record["done"].items()}
        journal.begin()
        yield journal


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``; nobody else works in it meanwhile. Without a journal nothing is left behind."""
    with naming(folder):
        (folder / WORK).mkdir(exist_ok=True)
    with _locked(folder / WORK / _LOCK, folder):
        try:
            yield
        finally:
            if not (folder / WORK / _JOURNAL).exists():
                shutil.rmtree(folder / WORK, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino != path.stat().st_ino:
                raise OSError("its holder has just finished, and removed the file")
        except OSError:
            message = f"another process works in {folder}"
            raise SurroundingsError(Problem("locked", message, remedy="wait for it, or stop it")) from None
        yield
    finally:
        os.close(descriptor)


def _clear(folder: Path, record: dict[str, Any]) -> None:
    """Remove what the recorded job may have written, and nothing else; what makes it look whole goes first."""
    for name in sorted(record["files"], key=lambda name: name not in CONFIG_FILES):
        path = folder / name
        if path.resolve().is_relative_to(folder.resolve()):
            path.unlink(missing_ok=True)
    (folder / WORK / _JOURNAL).unlink()


def fingerprint_of(plan: Plan) -> str:
    """Return what makes a job the same job: version, recipe, and the source's headers and config."""
    checkpoint, wish = plan.checkpoint, plan.recipe.to_json()
    shards = [(shard.shard, shard.size, shard.digest) for shard in checkpoint.shards]
    config = xxhash.xxh3_128_hexdigest(checkpoint.config or b"")
    scales = _state_of(plan.recipe.input_scale.path)
    return xxhash.xxh3_128_hexdigest(json.dumps([__version__, wish, shards, config, scales]).encode())


def _state_of(path: Path | None) -> list[tuple[str, int, int]]:
    """Return what changes with the file, or with the files of the folder, at ``path``."""
    if path is None:
        return []
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]


def left_behind(folder: Path) -> int:
    """Return the bytes that an unfinished job holds in ``folder``."""
    record = read_journal(folder) if folder.is_dir() else None
    paths = (folder / name for name in record["files"]) if record else ()
    return sum(path.stat().st_size for path in paths if path.is_file())


def free_space(folder: Path) -> int:
    """Return the bytes free where ``folder`` is, or will be."""
    while not folder.exists():
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free
