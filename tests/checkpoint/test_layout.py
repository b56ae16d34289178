"""Layouts: the safetensors library's order, maximal runs, and a header that lets pages be shared."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from checkpoint.folders import DTYPE_NAMES, Arrays, arrays, noise
from requant.checkpoint.dtypes import DTYPES
from requant.checkpoint.header import ShardHeader, parse_header
from requant.checkpoint.layout import ShardLayout, TensorSpec, header_bytes, lay_out

if TYPE_CHECKING:
    import numpy as np

PAGE = 4096


def spec(name: str, array: np.ndarray) -> TensorSpec:
    return TensorSpec(name, DTYPE_NAMES[array.dtype], array.shape, array.nbytes)


def written(layout: ShardLayout, tensors: Arrays, source: bytes) -> bytes:
    """Build the file that the layout describes: copies from ``source``, the rest from ``tensors``."""
    data = bytearray(layout.data_bytes)
    for tensor, start in zip(layout.tensors, layout.starts(), strict=True):
        if tensor.name in tensors:
            data[start : start + tensor.nbytes] = tensors[tensor.name].tobytes()
    for run in layout.runs:
        data[run.start : run.start + run.nbytes] = source[run.source_offset : run.source_offset + run.nbytes]
    return header_bytes(layout) + bytes(data)


def header_of(blob: bytes, shard: str = "source.safetensors") -> ShardHeader:
    return parse_header(shard, blob, len(blob))


@given(arrays(), st.randoms())
def test_a_new_shard_is_the_library_s_byte_for_byte(tensors: Arrays, random: object) -> None:
    specs = [spec(name, array) for name, array in tensors.items()]
    random.shuffle(specs)  # type: ignore[attr-defined]
    layout = lay_out("m", specs, [], {"format": "pt"})
    assert (layout.runs, layout.shared_bytes) == ((), 0)
    assert written(layout, tensors, b"") == save(tensors, {"format": "pt"})


@given(arrays(), arrays())
def test_kept_and_new_tensors_make_one_ordinary_file(kept: Arrays, new: Arrays) -> None:
    kept = {name: array for name, array in kept.items() if name not in new}
    source = save(kept, {"format": "pt"})
    layout = lay_out("m", [spec(n, a) for n, a in new.items()], header_of(source).tensors, {"format": "pt"})
    out = written(layout, new, source)
    header = header_of(out)
    expected = header_of(save(kept | new, {"format": "pt"}))
    assert [(t.name, t.dtype, t.shape) for t in header.tensors] == [
        (t.name, t.dtype, t.shape) for t in expected.tensors
    ]
    for tensor in header.tensors:
        array = (kept | new)[tensor.name]
        assert out[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()
        assert tensor.offset % min(8, DTYPES[tensor.dtype].bits // 8) == 0


def test_untouched_neighbours_move_as_one_run() -> None:
    tensors = {name: noise("BF16", (4, 8)) for name in "abcdef"}
    header = header_of(save(tensors))
    first = header.tensors[0].offset
    layout = lay_out("m", [], header.tensors, {})
    assert [(r.shard, r.source_offset, r.start, r.nbytes) for r in layout.runs] == [
        ("source.safetensors", first, 0, 6 * 64)
    ]
    replaced = TensorSpec("c", "U8", (32,), 32)
    kept = [tensor for tensor in header.tensors if tensor.name != "c"]
    layout = lay_out("m", [replaced], kept, {})
    assert [(r.source_offset - first, r.start, r.nbytes) for r in layout.runs] == [(0, 0, 128), (192, 128, 192)]


def test_runs_do_not_join_two_files() -> None:
    one, two = save({"a": noise("U8", (64,))}), save({"b": noise("U8", (64,))})
    kept = [*header_of(one, "1.safetensors").tensors, *header_of(two, "2.safetensors").tensors]
    assert [(run.shard, run.start) for run in lay_out("m", [], kept, {}).runs] == [
        ("1.safetensors", 0),
        ("2.safetensors", 64),
    ]


sizes = st.lists(st.integers(1, 40_000), min_size=1, max_size=6)


@given(sizes, st.sets(st.integers(0, 5)), st.integers(1, 5000))
def test_the_header_shares_as_many_pages_as_any_could(nbytes: list[int], replaced: set[int], size: int) -> None:
    source = save({f"t{i}": noise("U8", (n,)) for i, n in enumerate(nbytes)})
    kept = [t for t in header_of(source).tensors if int(t.name[1:]) not in replaced]
    new = [TensorSpec(f"t{i}", "U8", (size,), size) for i in replaced if i < len(nbytes)]
    layout = lay_out("m", new, kept, {})
    assert sum(run.nbytes for run in layout.runs) == sum(t.nbytes for t in kept)
    assert all(a.start + a.nbytes <= b.start for a, b in pairwise(layout.runs))

    def shared(data_start: int) -> int:
        pages = 0
        for run in layout.runs:
            if (data_start + run.start - run.source_offset) % PAGE == 0:
                inside = range(-(-run.source_offset // PAGE) * PAGE, run.source_offset + run.nbytes - PAGE + 1, PAGE)
                pages += len(inside)
        return pages * PAGE

    length = len(header_bytes(layout))
    assert length % 8 == 0
    assert shared(length) == layout.shared_bytes == max(map(shared, range(0, PAGE, 8)))


def test_a_name_cannot_occur_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        lay_out("m", [TensorSpec("w", "U8", (1,), 1), TensorSpec("w", "I8", (1,), 1)], [], {})
