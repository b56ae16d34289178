"""Headers: read as the safetensors library reads them, written as it writes them, refused with reasons."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from checkpoint.folders import DTYPE_NAMES, Arrays, arrays, noise
from requant.checkpoint.dtypes import DTYPES, payload_bytes
from requant.checkpoint.header import _plain_header, encode_header, parse_header
from requant.errors import CheckpointError, Problem


def file_of(header: Any, data: bytes = b"", separators: tuple[str, str] = (",", ":")) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=separators).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def refusal(blob: bytes, size: int | None = None) -> tuple[Problem, ...]:
    with pytest.raises(CheckpointError) as caught:
        parse_header("model.safetensors", blob, len(blob) if size is None else size)
    return caught.value.problems


def library_accepts(blob: bytes) -> bool:
    try:
        deserialize(blob)
    except SafetensorError:
        return False
    return True


@given(arrays(), st.none() | st.dictionaries(st.text(), st.text(), min_size=1, max_size=1))
def test_every_tensor_of_a_library_file_is_found(tensors: Arrays, metadata: dict[str, str] | None) -> None:
    blob = save(tensors, metadata)
    header = parse_header("m.safetensors", blob, len(blob))
    assert header.metadata == (metadata or {})
    assert {ref.name for ref in header.tensors} == tensors.keys()
    for ref in header.tensors:
        array = tensors[ref.name]
        assert (ref.dtype, ref.shape, ref.shard) == (DTYPE_NAMES[array.dtype], array.shape, "m.safetensors")
        assert blob[ref.offset : ref.offset + ref.nbytes] == array.tobytes()
    assert (
        encode_header([(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors], header.metadata)
        == (blob[: header.data_start])
    )


def test_tensors_come_in_file_order_whatever_the_json_says() -> None:
    blob = file_of({"b": entry("U8", [2], 2, 4), "e": entry("U8", [0], 2, 2), "a": entry("U8", [2], 0, 2)}, b"aabb")
    assert library_accepts(blob)
    assert [ref.name for ref in parse_header("m", blob, len(blob)).tensors] == ["a", "e", "b"]


@given(arrays(), st.none() | st.dictionaries(st.text(), st.text(), min_size=1, max_size=1))
def test_the_short_way_through_a_plain_header_leads_to_the_same(
    tensors: Arrays, metadata: dict[str, str] | None
) -> None:
    blob = save(tensors, metadata)
    end = 8 + int.from_bytes(blob[:8], "little")
    spaced = file_of(json.dumps(json.loads(blob[8:end])).encode(), blob[end:])
    short, long = parse_header("m", blob, len(blob)), parse_header("m", spaced, len(spaced))
    shift = long.data_start - short.data_start
    assert [ref._replace(offset=ref.offset + shift) for ref in short.tensors] == long.tensors
    assert short.metadata == long.metadata
    text = "".join([*tensors, *(metadata or {}), *(metadata or {}).values()])
    if tensors and text.isprintable() and not set('"\\}') & set(text):
        assert _plain_header("m", blob[:end], len(blob)) == short


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":1,"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},}',
        b'{"b":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}',
        b'{"b":{"dtype":"U8","shape":[1,],"data_offsets":[0,1]}}',
        b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}',
        b'{"b\n":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"a":"1",},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    ],
)
def test_what_is_almost_a_plain_header_is_refused(header: bytes) -> None:
    blob = file_of(header, b"x")
    assert not library_accepts(blob)
    assert refusal(blob)


def test_only_the_header_is_needed_and_decides_the_digest() -> None:
    blob = save({"w": noise("F32", (16, 16))})
    header = parse_header("m", blob, len(blob))
    assert parse_header("m", blob[: header.data_start], len(blob)) == header
    other = save({"w": noise("F32", (16, 16), seed=1)})
    assert parse_header("m", other, len(other)).digest == header.digest
    renamed = save({"v": noise("F32", (16, 16))})
    assert parse_header("m", renamed, len(renamed)).digest != header.digest


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_library_takes_every_dtype_at_our_size(dtype: str) -> None:
    nbytes = payload_bytes(dtype, (3, 8))
    blob = file_of({"w": entry(dtype, [3, 8], 0, nbytes)}, bytes(nbytes))
    assert library_accepts(blob)
    assert parse_header("m", blob, len(blob)).tensors[0].nbytes == nbytes


@pytest.mark.parametrize("extra", [{}, {"note": {"a": 1}}])
def test_unknown_keys_and_null_metadata_pass_as_in_the_library(extra: dict[str, Any]) -> None:
    blob = file_of({"__metadata__": None, "w:0": entry("U8", [1], 0, 1) | extra}, b"x")
    assert library_accepts(blob)
    assert [ref.name for ref in parse_header("m", blob, len(blob)).tensors] == ["w:0"]


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_file_shorter_than_the_prefix(length: int) -> None:
    (problem,) = refusal(bytes(length))
    assert (problem.code, problem.module) == ("header-invalid", "model.safetensors")


def test_a_pointer_of_git_lfs_is_called_by_its_name() -> None:
    (problem,) = refusal(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "git lfs pull" in problem.message


UNREADABLE = {
    "header over 100 MB": (100_000_001).to_bytes(8, "little") + b"{}",
    "header beyond the file": (64).to_bytes(8, "little") + b"{}",
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "not JSON": file_of(b'{"w": '),
    "trailing zero": file_of(b"{}\0"),
    "NaN": file_of(b'{"w": NaN}'),
    "a list": file_of([]),
    "a huge number": file_of(b'{"w": ' + b"9" * 5000 + b"}"),
    "deep nesting": file_of(b'{"w": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep objects": file_of(b'{"w":' * 100_000 + b"1" + b"}" * 100_000),
    "half a surrogate pair": file_of(b'{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "duplicate in a tensor": file_of(b'{"w": {"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}'),
}


@pytest.mark.parametrize("blob", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_is_no_header_is_refused(blob: bytes) -> None:
    assert not library_accepts(blob)
    (problem,) = refusal(blob)
    assert (problem.code, problem.module) == ("header-invalid", "model.safetensors")


W = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize(
    "text",
    [
        f'{{"w":{W},"w":{W}}}',
        f'{{"w":{W},"\\u0077":{W}}}',
        f'{{"w":{W},"__metadata__":{{"a":"1","a":"2"}}}}',
        f'{{"w":{W},"__metadata__":{{}},"__metadata__":{{}}}}',
        '{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{"y":1,"y":2}}}',
    ],
)
def test_duplicate_keys_are_refused_at_every_level(text: str) -> None:
    (problem,) = refusal(file_of(text.encode(), b"x"))
    assert problem.code == "header-invalid"
    assert "duplicate key" in problem.message


MALFORMED = {
    "unknown dtype": entry("F7", [1], 0, 1),
    "dtype is a number": entry(8, [1], 0, 1),  # type: ignore[arg-type]
    "no dtype": {"shape": [1], "data_offsets": [0, 1]},
    "no shape": {"dtype": "U8", "data_offsets": [0, 1]},
    "negative extent": entry("U8", [-1], 0, 1),
    "boolean extent": entry("U8", [True], 0, 1),
    "float extent": entry("U8", [1.0], 0, 1),
    "text extent": entry("U8", ["1"], 0, 1),
    "nested shape": entry("U8", [[1]], 0, 1),
    "shape is no list": entry("U8", 1, 0, 1),
    "shape is an object": entry("U8", {}, 0, 1),
    "overflowing shape": entry("U8", [2**32, 2**32], 0, 1),
    "overflowing extent": entry("U8", [2**70], 0, 1),
    "overflowing before a zero": entry("U8", [2**40, 2**40, 0], 0, 0),
    "boolean offset": entry("U8", [1], False, True),
    "float offset": entry("U8", [1], 0, 1.0),
    "negative offset": entry("U8", [1], -1, 0),
    "huge offset": entry("U8", [1], 2**64, 2**64 + 1),
    "one offset": entry("U8", [1], 0),
    "three offsets": entry("U8", [1], 0, 1, 1),
    "no offsets": {"dtype": "U8", "shape": [1]},
    "reversed offsets": entry("U8", [1], 1, 0),
    "offsets disagree with the shape": entry("U16", [1], 0, 1),
    "unknown dtype and reversed offsets": entry("F7", [1], 1, 0),
    "half a byte": entry("F4", [1], 0, 1),
    "beyond the file": entry("U8", [2], 0, 2),
    "a gap before": entry("U8", [0], 1, 1),
    "entry is text": "U8",
    "entry is null": None,
}


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_bad_tensor_is_named_with_its_file(bad: Any) -> None:
    blob = file_of({"bad": bad}, b"x")
    assert not library_accepts(blob)
    problem = refusal(blob)[0]
    assert (problem.code, problem.module) == ("header-invalid", "bad")
    assert "model.safetensors" in problem.message
    spaced = file_of({"bad": bad}, b"x", separators=(", ", ": "))
    assert refusal(spaced) == refusal(blob)


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        pytest.param((0, 4), (2, 6), 6, id="overlap"),
        pytest.param((0, 4), (5, 9), 9, id="gap"),
        pytest.param((1, 5), (5, 9), 9, id="gap at the start"),
        pytest.param((0, 4), (0, 4), 4, id="shared"),
        pytest.param((0, 4), (4, 8), 7, id="file too short"),
        pytest.param((0, 4), (4, 8), 9, id="file too long"),
    ],
)
def test_data_must_cover_the_file_exactly(first: tuple[int, int], second: tuple[int, int], size: int) -> None:
    blob = file_of({"a": entry("U8", [4], *first), "b": entry("U8", [4], *second)}, bytes(size))
    assert not library_accepts(blob)
    assert {problem.code for problem in refusal(blob)} == {"header-invalid"}


@pytest.mark.parametrize("metadata", [[], "text", 1, {"a": 1}, {"a": None}, {"a": {}}])
def test_metadata_must_be_text(metadata: Any) -> None:
    blob = file_of({"__metadata__": metadata})
    assert not library_accepts(blob)
    assert "__metadata__" in refusal(blob)[0].message


@pytest.mark.parametrize("name", ["", "w\0", "\0"])
def test_names_that_are_none(name: str) -> None:
    (problem,) = refusal(file_of({name: entry("U8", [1], 0, 1)}, b"x"))
    assert problem.code == "name-hostile"


def test_all_faults_of_a_file_come_at_once() -> None:
    tensors = {"": entry("U8", [1], 0, 1), "dtype": entry("F7", [1], 1, 2), "shape": entry("U8", [1.5], 2, 3)}
    tensors |= {"size": entry("U8", [2], 3, 4), "end": entry("U8", [9], 4, 13)}
    problems = refusal(file_of({"__metadata__": {"a": 1}} | tensors, bytes(4)))
    told = {problem.module for problem in problems}
    assert {"dtype", "shape", "size", "end"} <= told
    assert len(problems) == 6


def test_thousands_of_one_kind_are_counted_and_hide_no_other() -> None:
    tensors = {f"w{i}": entry("F7", [1], i, i + 1) for i in range(1000)} | {"odd": entry("U8", [2], 1000, 1001)}
    problems = refusal(file_of(tensors, bytes(1001)))
    assert 50 < len(problems) < 60
    assert any("950 more" in problem.message for problem in problems)
    assert "odd" in {problem.module for problem in problems}


@given(arrays().filter(bool), st.data())
def test_what_the_library_refuses_is_never_accepted(tensors: Arrays, data: st.DataObject) -> None:
    blob = bytearray(save(tensors, {"format": "pt"}))
    end = 8 + int.from_bytes(blob[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(8, end - 1))] = data.draw(st.sampled_from(b'0123456789-.[]{}",:\\ eU8F'))
    try:
        header = parse_header("m", bytes(blob), len(blob))
    except CheckpointError:
        return
    theirs = {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in deserialize(bytes(blob))}
    ours = {t.name: (t.dtype, t.shape, bytes(blob[t.offset : t.offset + t.nbytes])) for t in header.tensors}
    assert ours == theirs


@pytest.mark.parametrize(("residue", "modulus"), [(0, 8), (8, 4096), (4088, 4096), (0, 4096)])
def test_padding_moves_the_data_and_changes_nothing_else(residue: int, modulus: int) -> None:
    specs = [("w", "U8", (3,), 3)]
    header = encode_header(specs, {"format": "pt"}, residue=residue, modulus=modulus)
    assert len(header) % modulus == residue
    assert len(header) < len(encode_header(specs, {"format": "pt"})) + modulus
    ((name, tensor),) = deserialize(header + b"abc")
    assert (name, bytes(tensor["data"])) == ("w", b"abc")
