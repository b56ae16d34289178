"""Put a new ``quantization_config``, and other settings, into a config.json and leave every other byte as it was.

Only the spans of the old values are found and replaced, so that number spellings, escapes, key order,
indentation, line ends and a byte order mark survive; what is written follows the style around it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from requant.checkpoint.strict_json import load_object
from requant.errors import CheckpointError, Problem

KEY = "quantization_config"

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


def edit_config(
    raw: bytes,
    quantization_config: dict[str, Any] | None,
    settings: Mapping[str, str] = MappingProxyType({}),
    key: str = KEY,
) -> bytes:
    """Return config.json with ``quantization_config`` at its top level and wherever one is one level down.

    One level down is ``text_config`` and its like; all get the same value. A missing top-level key is added
    at the end. None takes the key away, wherever it is; ``key`` is what it is called. ``settings`` are set at the top
    level only. Raises CheckpointError (``header-invalid``) unless ``raw`` is one JSON object in UTF-8 in which no
    object has a key twice.
    """
    mark = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
    text = _checked(raw.removeprefix(mark))
    for name, value in settings.items():
        text = _with_setting(text, name, value)
    return mark + _with_quantization(text, key, quantization_config).encode()


def _with_setting(text: str, key: str, value: str) -> str:
    top = _object_at(text, _skip_space(text, 0))
    found = next((member for member in top.members if member.key == key), None)
    edit = _added(text, top, key, value) if found is None else _Edit(found.start, found.end, json.dumps(value))
    return text[: edit.start] + edit.new + text[edit.end :]


def _with_quantization(text: str, key: str, quantization_config: dict[str, Any] | None) -> str:
    top = _object_at(text, _skip_space(text, 0))
    nested = [
        _object_at(text, member.start) for member in top.members if member.key != key and text[member.start] == "{"
    ]
    edits = [
        _removed(parent, member)
        if quantization_config is None
        else _replaced(text, parent, member, quantization_config)
        for parent in (top, *nested)
        for member in parent.members
        if member.key == key
    ]
    if quantization_config is not None and all(member.key != key for member in top.members):
        edits.append(_added(text, top, key, quantization_config))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


class _Edit(NamedTuple):
    """Replace ``text[start:end]`` with ``new``."""

    start: int
    end: int
    new: str


class _Member(NamedTuple):
    """A member: its key, in quotes, is ``text[key_start:key_end]``, its value ``text[start:end]``."""

    key: str
    key_start: int
    key_end: int
    start: int
    end: int


class _Object(NamedTuple):
    """An object: its brace is at ``start``, its closing brace at ``end``."""

    start: int
    end: int
    members: list[_Member]


class _Style(NamedTuple):
    """How a member is set: the white space before its key and around its colon, its parent's indentation."""

    before_key: str
    colon: str
    outer_indent: str

    def render(self, value: dict[str, Any] | str) -> str:
        """Return ``value`` as JSON (ASCII), set as this style's siblings are."""
        newline, indent = _last_line(self.before_key)
        if not newline:
            gap = " " if self.colon.endswith(" ") else ""
            return json.dumps(value, separators=(f",{gap}", f":{gap}"))
        step = indent.removeprefix(self.outer_indent)
        return json.dumps(value, indent=step).replace("\n", newline + indent)


def _replaced(text: str, parent: _Object, member: _Member, value: dict[str, Any]) -> _Edit:
    return _Edit(member.start, member.end, _style(text, parent, member).render(value))


def _removed(parent: _Object, member: _Member) -> _Edit:
    """Take a member away with the comma behind it, or before it if it is the last."""
    place = parent.members.index(member)
    if place + 1 < len(parent.members):
        return _Edit(member.key_start, parent.members[place + 1].key_start, "")
    return _Edit(parent.members[place - 1].end if place else member.key_start, member.end, "")


def _added(text: str, parent: _Object, key: str, value: dict[str, Any] | str) -> _Edit:
    """Add a key after the last member."""
    if not parent.members:
        return _Edit(parent.start + 1, parent.start + 1, json.dumps({key: value})[1:-1])
    last = parent.members[-1]
    style = _style(text, parent, last)
    before_key = style.before_key
    if len(parent.members) == 1 and not before_key and style.colon.endswith(" "):
        before_key = " "
    return _Edit(last.end, last.end, f',{before_key}"{key}"{style.colon}{style.render(value)}')


def _style(text: str, parent: _Object, member: _Member) -> _Style:
    _, outer_indent = _last_line(_space_before(text, parent.end))
    return _Style(_space_before(text, member.key_start), text[member.key_end : member.start], outer_indent)


def _last_line(space: str) -> tuple[str, str]:
    """Split white space into its line end ("" if there is none) and the indentation after it."""
    lines = re.split(r"(\r\n|\n|\r)", space)
    return ("", space) if len(lines) == 1 else (lines[-2], lines[-1])


def _space_before(text: str, end: int) -> str:
    return text[len(text[:end].rstrip(" \t\r\n")) : end]


def _skip_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def _object_at(text: str, start: int) -> _Object:
    """Find the members of the object whose brace is at ``start``, in a text known to be valid."""
    members = []
    at = _skip_space(text, start + 1)
    while text[at] != "}":
        if text[at] == ",":
            at = _skip_space(text, at + 1)
        key, key_end = _DECODER.raw_decode(text, at)
        value_at = _skip_space(text, text.index(":", key_end) + 1)
        _, end = _DECODER.raw_decode(text, value_at)
        members.append(_Member(key, at, key_end, value_at, end))
        at = _skip_space(text, end)
    return _Object(start, at, members)


def _checked(raw: bytes) -> str:
    """Return the text of a JSON object without repeated keys; anything else is a CheckpointError."""
    try:
        load_object(raw, allow_constants=True)
    except ValueError as error:
        problem = Problem("header-invalid", str(error), "config.json", "restore the file from its source")
        raise CheckpointError(problem) from None
    return raw.decode()
