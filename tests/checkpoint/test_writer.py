"""Writing: whole files or none, from any thread, and every refusal of the system by its name."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import deserialize
from safetensors.numpy import load_file, save

from checkpoint.folders import DTYPE_NAMES, Arrays, noise
from requant.checkpoint import fsio
from requant.checkpoint.header import parse_header
from requant.checkpoint.layout import ShardLayout, TensorSpec, header_bytes, lay_out
from requant.checkpoint.store import LocalStore
from requant.checkpoint.writer import ShardWriter, copy_file, write_atomically
from requant.errors import SurroundingsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TENSORS: Arrays = {
    "model.norm.weight": noise("F32", (333,), 1),
    "model.w.weight": noise("BF16", (64, 100), 2),
    "model.w.weight_scale": noise("F8_E8M0", (64, 4), 3),
    "model.empty": noise("U8", (0, 4)),
}
BLOB = save(TENSORS, {"format": "pt"})


def layout() -> ShardLayout:
    specs = [TensorSpec(n, DTYPE_NAMES[a.dtype], a.shape, a.nbytes) for n, a in TENSORS.items()]
    return lay_out("model.safetensors", specs, [], {"format": "pt"})


def open_writer(folder: Path) -> ShardWriter:
    plan = layout()
    return ShardWriter(folder / "model.safetensors", folder / "model.partial", plan, header_bytes(plan))


def write_all(writer: ShardWriter) -> None:
    plan = layout()
    for tensor, start in zip(plan.tensors, plan.starts(), strict=True):
        writer.write(start, TENSORS[tensor.name].view("uint8") if tensor.nbytes else b"")


def failing_at(nth: int, number: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` with an OSError ``number`` instead of its ``nth`` run."""
    runs = iter(range(1, 1_000_000))

    def run(*args: Any) -> Any:
        if next(runs) == nth:
            raise OSError(number, os.strerror(number))
        return call(*args)

    return run


def test_a_shard_is_the_library_s_byte_for_byte(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    write_all(writer)
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == BLOB


def test_nothing_has_the_final_name_before_the_end(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    write_all(writer)
    assert [path.name for path in tmp_path.iterdir()] == ["model.partial"]
    assert (tmp_path / "model.partial").stat().st_size == len(BLOB)
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_what_an_interrupted_run_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.partial").write_bytes(b"\xff" * (2 * len(BLOB)))
    writer = open_writer(tmp_path)
    write_all(writer)
    writer.finish()
    assert (tmp_path / "model.safetensors").read_bytes() == BLOB


def test_a_loader_must_not_find_the_temporary_name(tmp_path: Path) -> None:
    plan = layout()
    with pytest.raises(ValueError, match="loader"):
        ShardWriter(tmp_path / "a.safetensors", tmp_path / "b.safetensors", plan, header_bytes(plan))


@pytest.mark.parametrize(("start", "nbytes"), [(-1, 1), (layout().data_bytes, 1), (0, layout().data_bytes + 1)])
def test_writes_stay_inside_the_data(tmp_path: Path, start: int, nbytes: int) -> None:
    writer = open_writer(tmp_path)
    with pytest.raises(ValueError, match="not within"):
        writer.write(start, bytes(nbytes))
    writer.discard()


def test_threads_write_tiles_in_any_order(tmp_path: Path) -> None:
    data = noise("U8", (1 << 20,), 4)
    plan = lay_out("m", [TensorSpec("w", "U8", data.shape, data.nbytes)], [], {})
    writer = ShardWriter(tmp_path / "m.safetensors", tmp_path / "m.partial", plan, header_bytes(plan))
    tiles = [slice(i, i + 4099) for i in range(0, len(data), 4099)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda tile: writer.write(tile.start, data[tile]), reversed(tiles)))
    writer.finish()
    assert load_file(tmp_path / "m.safetensors")["w"].tobytes() == data.tobytes()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:100], offset))
    writer = open_writer(tmp_path)
    write_all(writer)
    writer.finish()
    assert (tmp_path / "model.safetensors").read_bytes() == BLOB


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_file_systems_without_preallocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fsio, "fallocate", failing_at(1, number, fsio.fallocate))
    writer = open_writer(tmp_path)
    assert (tmp_path / "model.partial").stat().st_size == len(BLOB)
    write_all(writer)
    writer.finish()
    assert (tmp_path / "model.safetensors").read_bytes() == BLOB


def test_systems_without_the_calls_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("posix_fadvise", "copy_file_range"):
        monkeypatch.delattr(os, call)
    monkeypatch.setattr(fsio, "fallocate", failing_at(1, errno.ENOSYS, fsio.fallocate))
    (tmp_path / "source.safetensors").write_bytes(BLOB)
    header = parse_header("source.safetensors", BLOB, len(BLOB))
    plan = lay_out("m", [], header.tensors, header.metadata)
    writer = ShardWriter(tmp_path / "m.safetensors", tmp_path / "m.partial", plan, header_bytes(plan))
    with LocalStore(tmp_path) as store:
        store.read_once = True
        for run in plan.runs:
            writer.copy(store, run)
    writer.finish()
    found = {name: bytes(tensor["data"]) for name, tensor in deserialize((tmp_path / "m.safetensors").read_bytes())}
    assert found == {name: array.tobytes() for name, array in TENSORS.items()}


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("open", 1),
        ("fallocate", 1),
        *(("pwrite", nth) for nth in (1, 2, 3, 4)),
        ("fsync", 1),
        ("replace", 1),
        ("fsync", 2),
    ],
)
@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "no-space"), (errno.EDQUOT, "no-space"), (errno.EIO, "io")]
)
def test_every_refusal_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int, number: int, code: str
) -> None:
    owner = fsio if call == "fallocate" else os
    monkeypatch.setattr(owner, call, failing_at(nth, number, getattr(owner, call)))
    writer = None
    with pytest.raises(SurroundingsError) as caught:
        writer = open_writer(tmp_path)
        write_all(writer)
        writer.finish()
    if writer is not None:
        writer.discard()
    (problem,) = caught.value.problems
    assert (problem.code, problem.module) == (code, str(tmp_path / "model.partial"))
    assert (call, nth) == ("fsync", 2) or list(tmp_path.iterdir()) == []


def test_a_full_disk_while_copying_is_the_target_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source.safetensors").write_bytes(BLOB)
    header = parse_header("source.safetensors", BLOB, len(BLOB))
    plan = lay_out("m", [], header.tensors, {})
    writer = ShardWriter(tmp_path / "m.safetensors", tmp_path / "m.partial", plan, header_bytes(plan))
    monkeypatch.setattr(os, "copy_file_range", failing_at(1, errno.ENOSPC, os.copy_file_range))
    with LocalStore(tmp_path) as store, pytest.raises(SurroundingsError) as caught:
        writer.copy(store, plan.runs[0])
    writer.discard()
    assert [(p.code, p.module) for p in caught.value.problems] == [("no-space", str(tmp_path / "m.partial"))]


def test_a_bad_sector_while_copying_is_the_source_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's copy does not say which side failed; reading alone does."""
    (tmp_path / "source.safetensors").write_bytes(BLOB)
    header = parse_header("source.safetensors", BLOB, len(BLOB))
    plan = lay_out("m", [], header.tensors, {})
    writer = ShardWriter(tmp_path / "m.safetensors", tmp_path / "m.partial", plan, header_bytes(plan))
    monkeypatch.setattr(os, "copy_file_range", failing_at(1, errno.EIO, os.copy_file_range))
    monkeypatch.setattr(os, "preadv", failing_at(1, errno.EIO, os.preadv))
    with LocalStore(tmp_path) as store, pytest.raises(SurroundingsError) as caught:
        writer.copy(store, plan.runs[0])
    writer.discard()
    assert [(p.code, p.module) for p in caught.value.problems] == [("io", "source.safetensors")]


def test_small_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for data in (b"old", b"", b"new and longer"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(("call", "nth"), [("open", 1), ("pwrite", 1), ("fsync", 1), ("replace", 1)])
def test_a_small_file_stays_what_it_was_if_its_successor_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch, pytest.raises(SurroundingsError) as caught:
        patch.setattr(os, call, failing_at(nth, errno.ENOSPC, getattr(os, call)))
        write_atomically(path, b"new")
    assert [(p.code, p.module) for p in caught.value.problems] == [("no-space", str(path))]
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"config.json": b"old"}


def test_whole_files_are_copied_into_folders_that_are_made(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "blob").write_bytes(BLOB)
    (tmp_path / "source" / "tokenizer.model").symlink_to("../blob")
    (tmp_path / "source" / "empty").write_bytes(b"")
    with LocalStore(tmp_path / "source") as store:
        copy_file(store, "tokenizer.model", tmp_path / "out" / "deep" / "tokenizer.model")
        copy_file(store, "empty", tmp_path / "out" / "empty")
    copy = tmp_path / "out" / "deep" / "tokenizer.model"
    assert (copy.is_symlink(), copy.read_bytes()) == (False, BLOB)
    assert (tmp_path / "out" / "empty").read_bytes() == b""
