"""A config.json gets its new quantization_config and is otherwise the same file."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.errors import CheckpointError
from requant.plan.config_edit import edit_config

NEW = {"quant_method": "compressed-tensors", "ignore": ["re:.*ü\\d+$"], "block": [128, 128], "none": None}
OLD = "the old value, to be found again"

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.sampled_from(["quantization_config", "text_config", "compression_config"])
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=8)
objects = st.dictionaries(keys, values)


@st.composite
def files(draw: st.DrawFn, source: st.SearchStrategy[dict[str, Any]]) -> tuple[dict[str, Any], bytes]:
    """An object, and a file that holds it, in one of many styles."""
    value = draw(source)
    text = json.dumps(
        value,
        indent=draw(st.sampled_from([None, 0, 1, 2, 4, "\t"])),
        separators=draw(st.sampled_from([(",", ":"), (", ", ": "), (",", ": "), (" ,", " :\t")])),
        ensure_ascii=draw(st.booleans()),
    )
    text = text.replace("\n", draw(st.sampled_from(["\n", "\r\n", "\r"])))
    text = draw(st.sampled_from(["", "\n"])) + text + draw(st.sampled_from(["", "\n", " \r\n\n"]))
    return value, draw(st.sampled_from([b"", codecs.BOM_UTF8])) + text.encode()


def is_nested(key: str, value: Any) -> bool:
    return key != "quantization_config" and isinstance(value, dict) and "quantization_config" in value


@given(files(objects))
def test_only_the_one_key_changes(file: tuple[dict[str, Any], bytes]) -> None:
    source, raw = file
    wanted = {k: {**v, "quantization_config": NEW} if is_nested(k, v) else v for k, v in source.items()}
    wanted["quantization_config"] = NEW
    edited = edit_config(raw, NEW)
    after = json.loads(edited)
    assert after == wanted
    assert list(after) == list(wanted)
    assert edit_config(edited, NEW) == edited


def with_old(source: dict[str, Any]) -> dict[str, Any]:
    below = {k: {**v, "quantization_config": OLD} if is_nested(k, v) else v for k, v in source.items()}
    return {**below, "quantization_config": OLD}


@given(files(objects.map(with_old)))
def test_replacing_keeps_the_bytes_around_the_old_values(file: tuple[dict[str, Any], bytes]) -> None:
    _, raw = file
    kept = raw.split(json.dumps(OLD).encode())
    assert re.fullmatch(rb"\{.*\}".join(map(re.escape, kept)), edit_config(raw, NEW), re.DOTALL)


def without_key(source: dict[str, Any]) -> dict[str, Any]:
    return {k: 1 if is_nested(k, v) else v for k, v in source.items() if k != "quantization_config"}


@given(files(objects.map(without_key)))
def test_adding_keeps_all_bytes(file: tuple[dict[str, Any], bytes]) -> None:
    _, raw = file
    edited = edit_config(raw, NEW)
    added = len(edited) - len(raw)
    assert raw in {edited[:at] + edited[at + added :] for at in range(len(raw) + 1)}


def test_the_text_around_is_the_style() -> None:
    raw = b'{\r\n\t"dtype" : "bf16",\r\n\t"text_config" : {\r\n\t\t"quantization_config" : {}\r\n\t}\r\n}\r\n'
    lines = edit_config(raw, {"quant_method": "x", "ignore": []}).decode().split("\r\n")
    assert lines == [
        "{",
        '\t"dtype" : "bf16",',
        '\t"text_config" : {',
        '\t\t"quantization_config" : {',
        '\t\t\t"quant_method": "x",',
        '\t\t\t"ignore": []',
        "\t\t}",
        "\t},",
        '\t"quantization_config" : {',
        '\t\t"quant_method": "x",',
        '\t\t"ignore": []',
        "\t}",
        "}",
        "",
    ]


@pytest.mark.parametrize("style", [{"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}, {}])
def test_a_file_of_one_style_stays_of_one_style(style: dict[str, Any]) -> None:
    source = {"a": 1, "text_config": {"quantization_config": {"old": [1]}, "b": [1, {"c": "ü"}]}}
    wanted = {**source, "text_config": {**source["text_config"], "quantization_config": NEW}}
    wanted["quantization_config"] = NEW
    raw = json.dumps(source, **style).encode()
    assert edit_config(raw, NEW) == json.dumps(wanted, **style).encode()


@pytest.mark.parametrize("raw", [b'{"a": 1}', b'{"a":1}', b"{}", b"{\n}\n"])
def test_short_files(raw: bytes) -> None:
    edited = edit_config(raw, NEW)
    assert json.loads(edited) == {**json.loads(raw), "quantization_config": NEW}
    assert (b", " in edited) == (b'":1' not in raw)


def test_what_looks_like_the_key_is_left_alone() -> None:
    raw = rb"""{"a": "\"quantization_config\": 1", "b": [{"quantization_config": 2}], "e": 1.0e2, "f": "}",
        "c": {"d": {"quantization_config": 3}}, "compression_config": {"format": 4},
        "quantization\u005fconfig": 5}"""
    assert edit_config(raw, {}) == raw.replace(b": 5}", b": {}}")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        pytest.param(b"[]", "object", id="array"),
        pytest.param(b"null", "object", id="null"),
        pytest.param(b"", "JSON", id="empty"),
        pytest.param(b'{"a": 1', "JSON", id="cut off"),
        pytest.param(b'{"a": 1} {}', "JSON", id="two values"),
        pytest.param(b'{"a": "\xff"}', "UTF-8", id="not UTF-8"),
        pytest.param('{"a": 1}'.encode("utf-16"), "UTF-8", id="UTF-16"),
        pytest.param(b"[" * 200_000, "JSON", id="too deep"),
        pytest.param(b'{"a": 1, "a": 1}', "duplicate key 'a'", id="repeated key"),
        pytest.param(b'{"t": {"a": 1, "\\u0061": 1}}', "duplicate key 'a'", id="repeated key, nested and escaped"),
    ],
)
def test_not_a_config(raw: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        edit_config(raw, NEW)
    assert [problem.module for problem in caught.value.problems] == ["config.json"]
