"""Mistral's own checkpoints (params.json): FP8 per tensor, with the scales of weight and activations as qscale."""

from __future__ import annotations

from types import MappingProxyType

from requant.dialects.base import Dialect, InputScale, Spelling, scalar

MISTRAL = Dialect(
    "mistral",
    MappingProxyType({"fp8-tensor": (Spelling("weight"), Spelling("qscale_weight", shape=scalar))}),
    MappingProxyType({"fp8-tensor": InputScale("qscale_act", (), 448.0, divisor=False)}),
)
