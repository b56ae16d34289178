"""JSON as the format's own reader takes it: UTF-8, no duplicate keys, no NaN, nothing silently replaced."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from pydantic_core import from_json


def load_object(blob: bytes, *, allow_constants: bool = False) -> dict[str, Any]:
    """Parse ``blob`` as one JSON object; ``allow_constants``: with Python's NaN and Infinity as numbers.

    Raises ValueError with the reason: not UTF-8, not JSON, not an object, a key given twice at any depth,
    an escape that is no character, nesting too deep to parse.
    """
    document = _quickly(blob)
    if document is not None:
        return document
    try:
        text = blob.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    del blob  # the text of an index is 58 MB for half a million tensors: once is enough
    try:
        document = json.loads(
            text, object_pairs_hook=_unique, parse_constant=float if allow_constants else _refuse_constant
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    if "\\u" in text:
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("an escape is half a surrogate pair") from None
    return document


def _quickly(blob: bytes) -> dict[str, Any] | None:
    """Return the object where it is plain that nothing is wrong with it, in a fraction of the time.

    Every pair of the text has its colon, and the parser keeps one pair of each key: as many colons as pairs
    mean that no key occurs twice. Colons within strings only make the check fail.
    """
    if b"\\" in blob:
        return None
    try:
        document = from_json(blob, allow_inf_nan=False)
    except ValueError:
        return None
    if type(document) is not dict:
        return None
    pairs = len(document) + sum([len(value) for value in document.values() if type(value) is dict])
    return document if blob.count(b":") == pairs else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's pairs as a dict; ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {key!r}")
    return found


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"not JSON: {constant}")
