"""The store: byte ranges of named files, from any thread, with one descriptor for each file."""

from __future__ import annotations

import errno
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from requant.checkpoint.store import LocalStore
from requant.errors import SurroundingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DATA = np.random.default_rng(0).integers(0, 256, 3 * 4096 + 77, dtype=np.uint8).tobytes()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    root = tmp_path / "source"
    root.mkdir()
    (root / "data").write_bytes(DATA)
    with LocalStore(root) as opened:
        yield opened


def failing(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_files_are_listed_at_every_depth_and_through_links(tmp_path: Path) -> None:
    blobs, root = tmp_path / "blobs", tmp_path / "snapshot"
    (blobs / "folder").mkdir(parents=True)
    (blobs / "abc").write_bytes(b"12345")
    (blobs / "folder" / "x").write_bytes(b"1")
    (root / "deep" / "er").mkdir(parents=True)
    (root / "model.safetensors").symlink_to("../blobs/abc")
    (root / "deep" / "linked").symlink_to(blobs / "folder")
    (root / "deep" / "er" / "loop").symlink_to(root)
    (root / "deep" / "er" / "empty").write_bytes(b"")
    os.mkfifo(root / "pipe")
    with LocalStore(root) as store:
        assert store.files() == {"deep/er/empty": 0, "deep/linked/x": 1, "model.safetensors": 5}
        assert store.read("deep/linked/x", 0, 1) == b"1"


def test_a_link_to_nothing_is_not_passed_over(store: LocalStore) -> None:
    (store.root / "model.safetensors").symlink_to("blobs/gone")
    with pytest.raises(SurroundingsError) as caught:
        store.files()
    assert [problem.module for problem in caught.value.problems] == ["model.safetensors"]


def test_reads_are_exact(store: LocalStore) -> None:
    assert store.size("data") == len(DATA)
    assert store.read("data", 5000, 300) == DATA[5000:5300]
    tile = np.zeros((3, 50), np.uint16)
    store.read_into("data", 11, tile)
    assert tile.tobytes() == DATA[11:311]
    store.read_into("data", len(DATA), np.zeros((0, 4), np.uint8))


def test_reads_survive_short_counts(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:1000]], offset))
    assert store.read("data", 7, 9000) == DATA[7:9007]


def test_a_file_that_ends_early_is_named(store: LocalStore) -> None:
    with pytest.raises(SurroundingsError) as caught:
        store.read("data", len(DATA) - 10, 11)
    (problem,) = caught.value.problems
    assert (problem.code, problem.module) == ("io", "data")
    assert "1 bytes early" in problem.message


@pytest.mark.parametrize("use", [lambda s: s.read("gone", 0, 1), lambda s: s.size("gone")])
def test_a_file_that_is_not_there_is_named(store: LocalStore, use: Callable[[LocalStore], object]) -> None:
    with pytest.raises(SurroundingsError) as caught:
        use(store)
    (problem,) = caught.value.problems
    assert (problem.code, problem.module) == ("io", "gone")


def test_an_error_in_reading_names_the_file(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EIO))
    with pytest.raises(SurroundingsError) as caught:
        store.read("data", 0, 1)
    assert [problem.module for problem in caught.value.problems] == ["data"]


def test_many_threads_share_one_descriptor(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    plain = os.open
    monkeypatch.setattr(os, "open", lambda path, *args: opened.append(path) or plain(path, *args))
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda i: store.read("data", i * 100, 100), range(100)))
    assert b"".join(pieces) == DATA[:10_000]
    assert len(opened) == 1


def test_more_files_than_the_soft_limit_allows(tmp_path: Path) -> None:
    for i in range(80):
        (tmp_path / f"{i}").write_bytes(b"x")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(tmp_path, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 40, limits[1]))
    try:
        with LocalStore(tmp_path) as store:
            assert all(store.read(f"{i}", 0, 1) == b"x" for i in range(80))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_closing_gives_every_descriptor_back(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    plain = os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(plain(*args)) or opened[-1])
    store.read("data", 0, 1)
    store.close()
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def copied(store: LocalStore, target: Path, offset: int, nbytes: int, out_offset: int) -> bytes:
    fd = os.open(target, os.O_RDWR | os.O_CREAT)
    try:
        store.copy_to("data", offset, nbytes, fd, out_offset)
    finally:
        os.close(fd)
    return target.read_bytes()[out_offset:]


@pytest.mark.parametrize("out_offset", [0, 100, 100 + 4096, 5])
def test_copies_are_exact(store: LocalStore, tmp_path: Path, out_offset: int) -> None:
    assert copied(store, tmp_path / "out", 100, 3 * 4096 - 50, out_offset) == DATA[100 : 50 + 3 * 4096]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_copies_work_where_the_kernel_cannot(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "copy_file_range", failing(os.copy_file_range, number))
    assert copied(store, tmp_path / "out", 3, 9000, 1) == DATA[3:9003]


def test_copies_work_where_there_is_no_such_call(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    assert copied(store, tmp_path / "out", 3, 9000, 1) == DATA[3:9003]


@pytest.mark.parametrize("counts", [[1000] * 99, [1000, 0], [0]])
def test_copies_go_on_after_short_counts(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: list[int]
) -> None:
    plain, left = os.copy_file_range, iter(counts)

    def short(src: int, dst: int, count: int, src_offset: int, dst_offset: int) -> int:
        count = min(count, next(left))
        return plain(src, dst, count, src_offset, dst_offset) if count else 0

    monkeypatch.setattr(os, "copy_file_range", short)
    assert copied(store, tmp_path / "out", 3, 9000, 1) == DATA[3:9003]


def test_pages_that_can_be_shared_are_asked_for_as_pages(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    plain = os.copy_file_range

    def record(src: int, dst: int, count: int, src_offset: int, dst_offset: int) -> int:
        asked.append((src_offset, dst_offset))
        return plain(src, dst, count, src_offset, dst_offset)

    monkeypatch.setattr(os, "copy_file_range", record)
    assert copied(store, tmp_path / "out", 100, 9000, 4196) == DATA[100:9100]
    assert asked[:2] == [(100, 4196), (4096, 8192)]


def test_a_copy_from_a_file_that_ends_early_is_an_error(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(SurroundingsError, match="early"):
        copied(store, tmp_path / "out", 0, len(DATA) + 1, 0)


@pytest.mark.parametrize("read_once", [False, True])
def test_what_is_read_once_is_dropped_from_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_once: bool
) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(100_000))
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, start, nbytes, _advice: dropped.append((start, nbytes)))
    with LocalStore(tmp_path) as store, open(tmp_path / "out", "wb") as out:
        store.read_once = read_once
        store.read("a.safetensors", 10, 1000)
        store.copy_to("a.safetensors", 4096, 8192, out.fileno(), 0)
    assert sum(nbytes for _, nbytes in dropped) == (9192 if read_once else 0)
