"""Dialects: what the parts of a format are called on disk, and how config.json speaks of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from requant.dialects.base import Dialect, InputScale, Spelling
from requant.dialects.compressed_tensors import COMPRESSED_TENSORS
from requant.dialects.fp8 import FP8
from requant.dialects.modelopt import MODELOPT

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {dialect.name: dialect for dialect in (COMPRESSED_TENSORS, FP8, MODELOPT)}
)
"""Name → dialect, in the order in which a weight is tried against them."""

__all__ = ["DIALECTS", "Dialect", "InputScale", "Spelling"]
