"""``--manifest``: what lets someone else make the same checkpoint, and check it."""

from __future__ import annotations

import itertools
import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

import requant
from parity.checkpoints import Stored, read
from requant.checkpoint.hashing import CHUNK, TensorHashes
from requant.checkpoint.layout import TensorSpec, lay_out

if TYPE_CHECKING:
    from pathlib import Path

NAME = "requant-manifest.json"


def expected(tensor: Stored | bytes) -> str:
    """The definition: xxh3-128 over the digests of the chunks."""
    data = tensor if isinstance(tensor, bytes) else tensor.data
    chunks = [data[at : at + 4 * 2**20] for at in range(0, len(data), 4 * 2**20)]
    return xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_128_digest(chunk) for chunk in chunks))


def tensors_of(manifest: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(manifest.read_text())["tensors"]
    return found


def test_every_tensor_has_its_hash(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "out", recipe="kimi-k3-fp8-block", manifest=True)
    after = read(tmp_path / "out")
    assert tensors_of(tmp_path / "out" / NAME) == {name: expected(tensor) for name, tensor in after.items()}
    assert requant.verify(tmp_path / "out", manifest=tmp_path / "out" / NAME).ok


def test_another_machine_makes_the_same(small_k3: Path, tmp_path: Path) -> None:
    """Another place, another number of workers, an interruption: not a byte of the manifest changes."""
    requant.convert(small_k3, tmp_path / "a", recipe="kimi-k3-nvfp4-w4a4", manifest=True, workers=1)
    shutil.copytree(small_k3, tmp_path / "elsewhere" / "k3")
    requant.convert(
        tmp_path / "elsewhere" / "k3", tmp_path / "b", recipe="kimi-k3-nvfp4-w4a4", manifest=True, workers=4
    )
    text = (tmp_path / "a" / NAME).read_text()
    assert text == (tmp_path / "b" / NAME).read_text()
    assert str(tmp_path) not in text and "time" not in text
    requant.upgrade(tmp_path / "a", recipe="kimi-k3-fp8-attention", manifest=True)
    requant.upgrade(tmp_path / "b", recipe="kimi-k3-fp8-attention", manifest=True, workers=1)
    assert (tmp_path / "a" / NAME).read_text() == (tmp_path / "b" / NAME).read_text() != text
    assert requant.verify(tmp_path / "a", manifest=tmp_path / "b" / NAME).ok


def test_what_is_not_as_it_was_is_found(small_k3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    requant.convert(small_k3, folder, "FP8_BLOCK", manifest=True)
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = requant.verify(folder, "headers", manifest=folder / NAME)
    assert [problem.code for problem in found.problems] == ["differs"]


def test_a_manifest_does_not_outlive_what_it_describes(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "one", recipe="kimi-k3-nvfp4-w4a4", manifest=True)
    requant.convert(tmp_path / "one", tmp_path / "two", recipe="kimi-k3-fp8-attention")
    assert not (tmp_path / "two" / NAME).exists()
    requant.upgrade(tmp_path / "one", recipe="kimi-k3-fp8-attention")
    assert not (tmp_path / "one" / NAME).exists()


def test_shards_done_before_it_was_asked_for_are_read_again(
    small_k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from requant.execute import journal

    marked = journal.Journal.mark_done

    def interrupt(*args: Any) -> None:
        marked(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(journal.Journal, "mark_done", interrupt)
    with pytest.raises(KeyboardInterrupt):
        requant.convert(small_k3, tmp_path / "out", "FP8_BLOCK", workers=1)
    monkeypatch.undo()
    requant.convert(small_k3, tmp_path / "out", "FP8_BLOCK", manifest=True)
    assert requant.verify(tmp_path / "out", manifest=tmp_path / "out" / NAME).ok
    assert len(tensors_of(tmp_path / "out" / NAME)) == len(read(tmp_path / "out"))


@pytest.mark.parametrize("text", ["", "{}", '{"tensors": 1}', '{"tensors": {"a": 1}}'])
def test_files_that_are_no_manifest(small_k3: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(text)
    with pytest.raises(requant.CallError, match="manifest"):
        requant.verify(small_k3, manifest=file)


def test_hashes_do_not_depend_on_the_order_of_writes() -> None:
    rng = np.random.default_rng(0)
    sizes = {"a": 3 * CHUNK + 17, "b": 5, "empty": 0, "c": CHUNK}
    layout = lay_out("s", [TensorSpec(name, "U8", (size,), size) for name, size in sizes.items()], [], {})
    data = {name: rng.integers(0, 256, size, np.uint8).tobytes() for name, size in sizes.items()}
    whole = b"".join(data[spec.name] for spec in layout.tensors)
    cuts = sorted({0, len(whole), *rng.integers(0, len(whole), 40).tolist()})
    pieces = list(itertools.pairwise(cuts))
    rng.shuffle(pieces)
    hashes = TensorHashes(layout)
    for start, end in pieces:
        hashes.feed(int(start), memoryview(whole)[start:end])
    assert hashes.result() == {name: expected(content) for name, content in data.items()}
