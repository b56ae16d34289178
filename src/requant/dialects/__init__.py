"""Dialects: what the parts of a format are called on disk, and how config.json speaks of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from requant.dialects.base import Dialect, InputScale, Spelling
from requant.dialects.compressed_tensors import COMPRESSED_TENSORS
from requant.dialects.deepseek_v4 import DEEPSEEK_V4
from requant.dialects.fp8 import FP8
from requant.dialects.minimax import MINIMAX
from requant.dialects.mistral import MISTRAL, MISTRAL_HF
from requant.dialects.modelopt import MODELOPT

OUTPUT_DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {dialect.name: dialect for dialect in (COMPRESSED_TENSORS, FP8, MODELOPT)}
)
"""Name → dialect that requant writes."""

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {**OUTPUT_DIALECTS, **{dialect.name: dialect for dialect in (DEEPSEEK_V4, MINIMAX, MISTRAL, MISTRAL_HF)}}
)
"""Name → dialect that requant reads, in the order in which a weight is tried against them."""

__all__ = ["DIALECTS", "OUTPUT_DIALECTS", "Dialect", "InputScale", "Spelling"]
