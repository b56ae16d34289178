"""Sizes as people write them."""

from __future__ import annotations

import re

from requant.errors import CallError, Problem

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B?", re.ASCII | re.IGNORECASE)
_POWERS = "KMGT"


def parse_size(option: str, text: str | int) -> int:
    """Return the bytes that ``50GB``, ``500 MiB`` or a bare number mean; CallError where it is none, or nothing."""
    match = _SIZE.fullmatch(str(text).strip())
    size = 0
    if match is not None:
        unit = (match[2] or "").upper()
        power = 1 + _POWERS.index(unit[0]) if unit else 0
        size = int(min(float(match[1]), 2.0**63) * (1024 if unit.endswith("I") else 1000) ** power)
    if not 0 < size < 2**63:
        raise CallError(Problem("bad-option", f"{option} {text!r} is no size", remedy="as in 50GB, 5GiB, 500MB"))
    return size
